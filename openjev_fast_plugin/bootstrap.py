"""What the startup file runs when an interpreter starts: an import hook that waits for `jev.*`.

`sys` is all this module imports, nothing here raises on its own account, and until Open-Jev is imported the
hook costs one lookup per import. When a target has been executed, the patch module named after it is applied;
a patch that cannot be applied is handed to `backend_flag`, which reports it to whoever asks for a backend.

Not reached by the startup file: `python -S`, folders made with `pip install --target`, zipapps. There, run
`python -m openjev_fast_plugin jev.server ...` or call `install()` first.
"""

import sys

# Module -> patch module, applied after the module has been executed.
_TARGETS = {"jev.serving": "jev_serving", "jev.model": "jev_model"}
# Modules with an argument parser: asking for their spec comes before their code, also under `python -m`.
_PROGRAMS = ("jev.server", "jev.predict")
_watched = {*_TARGETS, *_PROGRAMS}
# What was changed -> its undo, in the order of the changes.
_undo: dict = {}


class _Loader:
    """The real loader, except that executing the module is followed by its patch. Gone once used.

    When the module is reloaded, its patch is taken off first and put on what it has become."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        name = module.__spec__.name
        module.__spec__.loader = module.__loader__ = self._loader
        undo = _undo.pop(name, None)
        if undo is not None:
            undo()
        try:
            self._loader.exec_module(module)
        except BaseException:
            if undo is not None:
                _patch(name, module)
            raise
        _patch(name, module)


class _Finder:
    def __init__(self):
        # Another hook that asks all finders but itself would otherwise call us back for ever.
        self._asking = set()

    def find_spec(self, name, path=None, target=None):
        if name not in _watched or name in self._asking:
            return None
        if name in _PROGRAMS:
            _watch_arguments()
        if name not in _TARGETS:
            return None
        self._asking.add(name)
        try:
            for finder in list(sys.meta_path):
                find_spec = None if finder is self else getattr(finder, "find_spec", None)
                spec = find_spec(name, path, target) if find_spec else None
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._asking.discard(name)
        if hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        else:
            _report(
                name, None, TypeError(f"{name}: expected a loader with exec_module, found {spec.loader!r}")
            )
        return spec


_finder = _Finder()


def install():
    """Put the hook first in `sys.meta_path` and catch up with what is imported. Again: does nothing."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    if any(name in sys.modules for name in _PROGRAMS):
        _watch_arguments()
    for name in list(_TARGETS):
        if name in sys.modules:
            _patch(name, sys.modules[name])


def uninstall():
    """Take the hook and everything it applied out again, last first. Models already taken over stay so."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _undo:
        _undo.popitem()[1]()
    _TARGETS.pop("jev.server", None)


def also_patch_server():
    """From now on patch `jev.server` too, should it be imported later: a backend of ours has been loaded."""
    _TARGETS["jev.server"] = "jev_server"


def _watch_arguments():
    try:
        from . import backend_flag

        undo = backend_flag.watch()
    except Exception:
        # Without the flag, argparse itself refuses `--backend fast`.
        return
    if undo is not None:
        _undo["arguments"] = undo


def _patch(name, module):
    try:
        from importlib import import_module

        undo = import_module(f"{__package__}.patches.{_TARGETS[name]}").apply(module)
    except Exception as error:
        _report(name, module, error)
    else:
        _undo[name] = undo


def _report(name, module, error):
    try:
        from . import backend_flag
    except Exception:
        return
    _undo[name] = backend_flag.failed(name, module, error)
