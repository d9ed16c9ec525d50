"""A STAND-IN for Open-Jev. This is not Open-Jev and shares no code with it.

`openjev-fast-plugin` accelerates Open-Jev (distribution `open-jev`, module `jev`), which is installed
from its own git repository. This package has the same names and the same behaviour where a caller can
see it, written anew from a description of that interface, so that the plugin's tests and demo run on
any machine. Its version ends in `+standin`. For real answers, install the real Open-Jev instead.
"""

__version__ = "0.1.0.dev0+standin"
