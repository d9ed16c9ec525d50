"""The `--backend` flag, and what it says when a patch could not be applied.

On its own, and leaning on `settings` alone, so that a broken patch or plugin cannot make the flag vanish: it
is there, and asking for a backend stops with the reason.
"""

import argparse
import contextlib
import contextvars
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .settings import AUTO, ORIGINAL, BackendError, Selection, origin, resolve

log = logging.getLogger("openjev_fast")

PROGRAMS = ("jev.server", "jev.predict")
BUILT_IN = (ORIGINAL, "fast", AUTO)
HELP = (
    "which backend computes the answers (openjev-fast-plugin): torch is the original, auto the best that "
    'takes this model; default: OPENJEV_BACKEND, then "backend" in the checkpoint\'s model.json, then torch'
)

# Target module -> why it could not be patched.
failures: dict[str, str] = {}


@dataclass
class Outer:
    """The choice of a `load_predictor` call, which the `DecisionModel.load` inside it follows."""

    selection: Selection | None


_outer: contextvars.ContextVar[Outer | None] = contextvars.ContextVar("outer", default=None)


@contextlib.contextmanager
def decided(selection: Selection | None) -> Iterator[None]:
    token = _outer.set(Outer(selection))
    try:
        yield
    finally:
        _outer.reset(token)


def outer() -> Outer | None:
    return _outer.get()


# The flag


@dataclass
class _Parsed:
    value: str | None
    typed: bool


_parsed: _Parsed | None = None
_UNTYPED: Any = object()


def watch() -> Callable[[], None] | None:
    """Wrap `ArgumentParser.parse_known_args`; returns the undo, or None where it is wrapped already."""
    original = argparse.ArgumentParser.parse_known_args
    if hasattr(original, "openjev_fast"):
        return None

    @functools.wraps(original)
    def parse_known_args(self, args=None, namespace=None, *rest, **more):
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "argparse":
            frame = frame.f_back
        if frame is None or not is_program(frame.f_globals):
            return original(self, args, namespace, *rest, **more)
        return _parse(original, self, args, namespace, *rest, **more)

    parse_known_args.openjev_fast = True  # type: ignore[attr-defined]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]

    def undo():
        if argparse.ArgumentParser.parse_known_args is parse_known_args:
            argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]

    return undo


def is_program(namespace: dict[str, Any]) -> bool:
    """Whether a module namespace is a program of Open-Jev, imported or run with `python -m`."""
    spec = namespace.get("__spec__")
    return namespace.get("__name__") in PROGRAMS or getattr(spec, "name", None) in PROGRAMS


def _parse(original, parser, args, namespace, *rest, **more):
    global _parsed
    arguments = [str(argument) for argument in (sys.argv[1:] if args is None else args)]
    action = parser._option_string_actions.get("--backend")
    ours = _names(arguments)
    if action is None:
        action = parser.add_argument("--backend", choices=ours, default=argparse.SUPPRESS, help=HELP)
        action.host_choices = ()
    elif not hasattr(action, "host_choices"):
        # The host's own flag: a host that takes any value (no choices) already takes ours.
        action.host_choices = tuple(action.choices or ())
    if action.host_choices:
        action.choices = [*action.host_choices, *(name for name in ours if name not in action.host_choices)]
    elif action.choices is not None:
        action.choices = ours

    # A value that parsing leaves in place was not typed; then the host's default goes where it would have.
    namespace = argparse.Namespace() if namespace is None else namespace
    if not hasattr(namespace, action.dest):
        setattr(namespace, action.dest, _UNTYPED)
    parsed, extras = original(parser, args, namespace, *rest, **more)
    typed = getattr(parsed, action.dest, _UNTYPED) is not _UNTYPED
    if not typed:
        _set_default(parser, action, parsed)
    _parsed = _Parsed(getattr(parsed, action.dest, None), typed)

    selection = resolve(flag=_parsed.value if typed else None)
    if failures and selection is not None and not _is_host_s(selection.name, action.host_choices):
        parser.error(_stop(selection))
    return parsed, extras


def _names(arguments: list[str]) -> list[str]:
    """The choices to show. Other plugins are loaded only when the flag or the help is asked for."""
    if any(argument.startswith(("--b", "-h", "--h")) for argument in arguments):
        try:
            from . import plugin

            for name, reason in plugin.plugin_manager().load_failures.items():  # type: ignore[attr-defined]
                log.warning("openjev-fast: plugin %r failed to load: %s", name, reason)
            return [ORIGINAL, *plugin.backends(), AUTO]
        except Exception as error:
            log.warning("openjev-fast: plugins cannot be listed: %s", error)
    return list(BUILT_IN)


def _set_default(parser, action, parsed) -> None:
    delattr(parsed, action.dest)
    default = parser._defaults.get(action.dest, action.default)
    if default is not argparse.SUPPRESS:
        setattr(
            parsed, action.dest, parser._get_value(action, default) if isinstance(default, str) else default
        )


def _is_host_s(name: str, host_choices: tuple) -> bool:
    return name == ORIGINAL or (name in host_choices and name not in BUILT_IN)


def split(backend: str | None) -> tuple[str | None, str | None]:
    """(flag, argument) behind the `backend` that reached `load_predictor`; an untyped default is neither.

    A typed flag counts once, for the call that follows the parsing, also where the host does not pass it on.
    """
    global _parsed
    parsed, _parsed = _parsed, None
    if parsed is None or (backend is not None and backend != parsed.value):
        return None, backend
    return (parsed.value, None) if parsed.typed else (None, None)


# Failed patches

# What stays usable, and is guarded, when its patch fails: module -> attribute path.
_GUARDED = {"jev.serving": ("load_predictor",), "jev.model": ("DecisionModel", "load")}


def failed(name: str, module: Any, error: Exception) -> Callable[[], None] | None:
    """Note a failed patch. Its function goes on as it is, unless a backend is asked for: then it stops.

    Returns the undo. Raises only if there is no function to guard and the environment asks for a backend."""
    failures[name] = (
        str(error)
        if isinstance(error, BackendError)
        else (f"{name}: the patch failed with {type(error).__name__}: {error}")
    )
    log.debug("openjev-fast: %s", failures[name])
    if name not in _GUARDED or module is None:
        return None
    *path, attribute = _GUARDED[name]
    holder = module
    for part in path:
        holder = getattr(holder, part, None)
    known = vars(holder).get(attribute) if holder is not None else None
    inner = known.__func__ if isinstance(known, classmethod | staticmethod) else known
    if not callable(inner):
        selection = resolve()
        if selection is not None and selection.name != ORIGINAL:
            raise BackendError(_stop(selection)) from error
        return None
    guarded = _guard(inner, takes_backend=name == "jev.serving")
    replacement = type(known)(guarded) if isinstance(known, classmethod | staticmethod) else guarded
    setattr(holder, attribute, replacement)

    def undo():
        failures.pop(name, None)
        if vars(holder).get(attribute) is replacement:
            setattr(holder, attribute, known)

    return undo


def _guard(function: Callable, takes_backend: bool) -> Callable:
    code = getattr(function, "__code__", None)
    host_parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()

    @functools.wraps(function)
    def guarded(*args, **arguments):
        around = outer()
        if around is not None:
            selection = around.selection
        elif takes_backend:
            backend = arguments.get("backend")
            flag, argument = split(backend)
            selection = resolve(flag, argument, arguments.get("checkpoint"))
            if "backend" not in host_parameters:
                arguments.pop("backend", None)
            elif selection is not None and selection.name not in BUILT_IN and selection.name == backend:
                # The host's own choice.
                selection = None
        else:
            flag, _ = split(None)
            checkpoint = args[1] if len(args) > 1 else arguments.get("output", arguments.get("path"))
            selection = resolve(flag, None, checkpoint)
        if selection is not None and selection.name != ORIGINAL:
            stop(BackendError(_stop(selection)), sys._getframe(1))
        if around is None and takes_backend:
            with decided(None):
                return function(*args, **arguments)
        return function(*args, **arguments)

    return guarded


def _stop(selection: Selection) -> str:
    reasons = "; ".join(failures.values())
    return f"{origin(selection)} cannot be used with this Open-Jev: {reasons}. Without it, it runs as before."


def stop(error: BackendError, caller: Any) -> None:
    """Raise `error`: as the last line of a program of Open-Jev, as an exception for everybody else."""
    if is_program(caller.f_globals):
        raise SystemExit(f"openjev-fast: {error}") from None
    raise error
