"""Changes to other people's code: one module per target.

Every patch names its target and the signature it knows, verifies before it changes anything, is applied whole
or not at all, and hands back `undo`. No maths here. Installed as `openjev_fast_plugin.patches`.
"""

from __future__ import annotations

import functools
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
    added. `starred` holds `*args` and `**kwargs`. `a|b`: either name will do, for a parameter that is always
    found by its position.
    """

    target: str
    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    starred: tuple[str, ...] = ()
    grows: bool = False

    def verify(self, function: Any) -> None:
        """Raise UnknownUpstream unless `function` is a plain function with this signature."""
        verify_any((self,), function)

    def fits(self, function: types.FunctionType) -> bool:
        positional, keyword_only, defaults, starred = _parts(function)
        first = positional[: len(self.positional)]
        extra = {*positional[len(first) :], *keyword_only} - set(self.keyword_only)
        return (
            len(first) == len(self.positional)
            and all(name in names.split("|") for name, names in zip(first, self.positional, strict=True))
            and set(keyword_only) >= set(self.keyword_only)
            and starred == self.starred
            and (extra <= set(defaults) if self.grows else not extra and defaults == dict(self.defaults))
        )

    def __str__(self) -> str:
        further = ("further=...",) if self.grows else ()
        return _text(self.positional, self.keyword_only, self.defaults, self.starred + further)


def verify_any(forms: tuple[Known, ...], function: Any) -> None:
    """Raise UnknownUpstream unless `function` is a plain function with one of these signatures of a target."""
    expected = " or ".join(map(str, forms))
    if not isinstance(function, types.FunctionType):
        found = "nothing" if function is None else repr(function)
    elif not any(form.fits(function) for form in forms):
        found = _text(*_parts(function))
    else:
        return
    raise UnknownUpstream(forms[0].target, expected, found)


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

    def rebind(self, home: types.ModuleType, name: str, wrap: Callable[[Any], Any]) -> None:
        """Wrap a function in its module and wherever `from module import name` has put it.

        Who imported it before its module was reloaded holds another function: that one is wrapped as well.
        The undo looks again, for those who imported a wrapper since.
        """

        def swap(found: Any, other: Any) -> None:
            for module, held in _holders(name):
                if held is found:
                    setattr(module, name, other)

        old = vars(home)[name]
        functions = [held for _, held in _holders(name) if isinstance(held, types.FunctionType)]
        for function in {old, *(each for each in functions if each.__module__ == old.__module__)}:
            wrapper = wrap(function)
            if function is old:
                self.replace(home, name, wrapper)
            swap(function, wrapper)
            self._undo.append(functools.partial(swap, wrapper, function))

    def undo(self) -> None:
        """Put the originals back, last first. What somebody else has replaced since is left to them."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.undo()


def _holders(name: str) -> Iterator[tuple[types.ModuleType, Any]]:
    """The loaded modules with a global of this name, and its value."""
    for module in list(sys.modules.values()):
        # Asking a lazily loaded module for an attribute would load it.
        space = object.__getattribute__(module, "__dict__") if isinstance(module, types.ModuleType) else {}
        if name in space:
            yield module, space[name]
