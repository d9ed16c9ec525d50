"""Changes to other people's code: one module per target.

Every patch names its target and the signature it knows, verifies before it changes anything, is applied whole
or not at all, and hands back `undo`. No maths here. Installed as `openjev_fast_plugin.patches`.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..settings import BackendError

log = logging.getLogger("openjev_fast")

_VARARGS, _VARKEYWORDS = 0x04, 0x08


class UnknownUpstream(BackendError):
    """The target is not what the patch knows: the message names it, what was expected and what was found."""

    def __init__(self, target: str, expected: str, found: str):
        super().__init__(f"{target}: expected {expected}, found {found}")


@dataclass(frozen=True)
class Known:
    """The signature of a function that a patch stands in for.

    Names, order and kinds must be these. With `grows` the replacement passes everything on, so defaults are
    free and further parameters that have one are accepted; without, the defaults must be these and nothing is
    added. `a|b`: either name will do, for a parameter that is always found by its position.
    """

    target: str
    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    grows: bool = False

    def verify(self, function: Any) -> None:
        """Raise UnknownUpstream unless `function` is a plain function with this signature."""
        if not isinstance(function, types.FunctionType):
            raise UnknownUpstream(self.target, str(self), "nothing" if function is None else repr(function))
        positional, keyword_only, defaults, starred = _parts(function)
        first = positional[: len(self.positional)]
        extra = {*positional[len(first) :], *keyword_only} - set(self.keyword_only)
        known = (
            len(first) == len(self.positional)
            and all(name in names.split("|") for name, names in zip(first, self.positional, strict=True))
            and set(keyword_only) >= set(self.keyword_only)
            and not starred
            and (extra <= set(defaults) if self.grows else not extra and defaults == dict(self.defaults))
        )
        if not known:
            raise UnknownUpstream(self.target, str(self), _text(positional, keyword_only, defaults, starred))

    def __str__(self) -> str:
        return _text(
            self.positional, self.keyword_only, self.defaults, ("further=...",) if self.grows else ()
        )


def _parts(function: types.FunctionType) -> tuple[tuple, tuple, dict, tuple]:
    # `inspect` would say the same for 8 ms more.
    code = function.__code__
    split, end = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    positional, keyword_only = code.co_varnames[:split], code.co_varnames[split:end]
    values = function.__defaults__ or ()
    defaults = dict(zip(positional[len(positional) - len(values) :], values, strict=True))
    defaults.update(function.__kwdefaults__ or {})
    starred = []
    if code.co_flags & _VARARGS:
        starred.append("*" + code.co_varnames[end])
    if code.co_flags & _VARKEYWORDS:
        starred.append("**" + code.co_varnames[end + bool(code.co_flags & _VARARGS)])
    return positional, keyword_only, defaults, tuple(starred)


def _text(positional: tuple, keyword_only: tuple, defaults: Mapping, starred: tuple) -> str:
    def one(name: str) -> str:
        return f"{name}={defaults[name]!r}" if name in defaults else name

    parts = [one(name) for name in positional]
    parts += [name for name in starred if name.startswith("*") and not name.startswith("**")] or (
        ["*"] if keyword_only else []
    )
    parts += [one(name) for name in keyword_only]
    parts += [name for name in starred if name.startswith("**") or not name.startswith("*")]
    return f"({', '.join(parts)})"


class Changes:
    """Replaced attributes. As a context it is all or nothing: an exception inside puts everything back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, holder: Any, name: str, new: Any) -> None:
        """Set one attribute that `holder` itself has."""
        old = vars(holder)[name]
        setattr(holder, name, new)

        def undo() -> None:
            if vars(holder).get(name) is new:
                setattr(holder, name, old)
            elif vars(holder).get(name) is not old:
                log.warning(
                    "openjev-fast: somebody else replaced %s.%s; left as it is", holder.__name__, name
                )

        self._undo.append(undo)

    def rebind(self, home: types.ModuleType, name: str, new: Any) -> None:
        """Replace a function in its module and wherever `from module import name` has put it.

        The undo looks again, for those who imported it since.
        """
        old = vars(home)[name]

        def swap(found: Any, other: Any) -> None:
            for module in _modules_holding(name, found):
                setattr(module, name, other)

        self.replace(home, name, new)
        swap(old, new)
        self._undo.append(lambda: swap(new, old))

    def undo(self) -> None:
        """Put the originals back, last first. What somebody else has replaced since is left to them."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.undo()


def _modules_holding(name: str, value: Any) -> Iterator[types.ModuleType]:
    for module in list(sys.modules.values()):
        # Asking a lazily loaded module for an attribute would load it.
        if (
            isinstance(module, types.ModuleType)
            and object.__getattribute__(module, "__dict__").get(name) is value
        ):
            yield module
