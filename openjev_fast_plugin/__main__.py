"""`python -m openjev_fast_plugin MODULE ...` is `python -m MODULE ...` with the import hook installed.

For interpreters whose startup files do not run it: `python -S`, `pip install --target` folders on PYTHONPATH.
"""

import runpy
import sys

from .bootstrap import install


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(
            "usage: python -m openjev_fast_plugin MODULE [ARGUMENT ...], for example jev.server --help"
        )
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
