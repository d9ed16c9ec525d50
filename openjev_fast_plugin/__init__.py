"""One packed forward for an Open-Jev server.

Importing this package imports nothing else: it is loaded at the start of every interpreter of the environment
it is installed in. The public names below load what they need when they are first used.
"""

# Known to type checkers by this name; importing `typing` would cost as much as all the rest of the start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .hookspecs import hookimpl
    from .settings import BackendError, Selection, Settings, resolve
    from .takeover import accelerate

__version__ = "0.1.0"

__all__ = ["BackendError", "Selection", "Settings", "accelerate", "hookimpl", "resolve"]

_HOME = {
    "BackendError": "settings",
    "Selection": "settings",
    "Settings": "settings",
    "accelerate": "takeover",
    "hookimpl": "hookspecs",
    "resolve": "settings",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
