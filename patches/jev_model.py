"""jev.model: `DecisionModel.load` returns a model that runs on the chosen backend.

Knows `load(cls, output, device)`; further parameters with a default are passed on. A `load_predictor`
call around it has decided already; on its own (`python -m jev.predict`, Python) it follows flag, environment,
model.json.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import backend_flag
from ..settings import AUTO, ORIGINAL, BackendError, Settings, resolve
from . import Changes, Known, UnknownUpstream

LOAD = Known(
    "jev.model.DecisionModel.load",
    positional=("cls", "output|path", "device"),
    defaults={"device": "cuda:0"},
    grows=True,
)

# Every class there is of this name: who imported it before its module was reloaded holds another one.
_classes: weakref.WeakSet[Any] = weakref.WeakSet()


def apply(module: ModuleType) -> Callable[[], None]:
    model_class = vars(module).get("DecisionModel")
    original = vars(model_class).get("load") if isinstance(model_class, type) else None
    if not isinstance(original, classmethod):
        raise UnknownUpstream(
            LOAD.target, f"classmethod {LOAD}", "nothing" if original is None else repr(original)
        )
    if hasattr(original.__func__, "openjev_fast"):
        return lambda: None
    LOAD.verify(original.__func__)
    _classes.add(model_class)
    with Changes() as changes:
        for each in _classes:
            changes.replace(each, "load", classmethod(_load(vars(each)["load"].__func__)))
    return changes.undo


def _load(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(cls, *args: Any, **arguments: Any) -> Any:
        around = backend_flag.outer()
        if around is not None:
            selection = around.selection
        else:
            flag, _ = backend_flag.split(None)
            checkpoint = args[0] if args else arguments.get("output", arguments.get("path"))
            selection = resolve(flag, None, checkpoint)
        if selection is None or selection.name == ORIGINAL or backend_flag.is_host_s(selection.name):
            return original(cls, *args, **arguments)

        # Not before somebody asks for a backend.
        from .. import plugin, takeover

        try:
            # What can be refused without the weights is refused before they are loaded.
            if selection.name != AUTO:
                plugin.find(selection.name)
            settings = Settings.read()
            model = original(cls, *args, **arguments)
            return takeover.accelerate(model, selection.name, settings, selection.decided_by)
        except BackendError as error:
            if around is None:
                backend_flag.stop(error, sys._getframe(1))
            raise

    load.openjev_fast = True  # type: ignore[attr-defined]
    return load
