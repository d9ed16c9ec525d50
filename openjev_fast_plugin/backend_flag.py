"""The `--backend` and `--warmup` flags, and what they say when a patch could not be applied.

On its own, and leaning on `settings` alone, so that a broken patch or plugin cannot make the flags vanish: they
are there, and asking for a backend stops with the reason.
"""

import argparse
import contextlib
import contextvars
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .settings import AUTO, ORIGINAL, BackendError, Selection, origin, resolve

log = logging.getLogger("openjev_fast")

PROGRAMS = ("jev.server", "jev.predict")
BUILT_IN = (ORIGINAL, "fast", "graph", AUTO)
HELP = (
    "which backend computes the answers (openjev-fast-plugin): fast computes text that prompts share once, graph "
    "replays the original modules as CUDA Graphs and needs no compiler, torch is the original, auto the best that "
    'takes this model; default: OPENJEV_BACKEND, then "backend" in the checkpoint\'s model.json, then torch'
)

WARMUP_HELP = (
    "before the port opens, make what first requests would wait for (openjev-fast-plugin, on a backend of its own). "
    "FILE holds example requests as they are posted, one JSON object after another or one array of them; each is "
    "answered once. ROWS are sizes, 72,280 or 8-512:64 (from 8 to 512, every 64th), with backend fast: each stands for "
    "one yes-or-no question of that many tokens, or up to seven fewer. On a GPU the matmuls of these requests are then "
    "tuned, unless OPENJEV_FAST_TUNING=off, and their graphs captured; on a CPU they only run once. Default: "
    "OPENJEV_FAST_WARMUP, then none"
)

# Target module -> why it could not be patched.
failures: dict[str, str] = {}

# What the `--backend` of the program that was started takes by itself; empty where the flag is ours.
host_choices: tuple = ()


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
# What follows `--warmup`, where it was typed. Never in the host's namespace: the host passes all of that on.
_WARMUP = "openjev_fast_warmup"
_warmup: str | None = None


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
        warms_up = _is("jev.server", frame.f_globals)
        return _parse(original, warms_up, self, args, namespace, *rest, **more)

    parse_known_args.openjev_fast = True  # type: ignore[attr-defined]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]

    def undo():
        if argparse.ArgumentParser.parse_known_args is parse_known_args:
            argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]

    return undo


def is_program(namespace: dict[str, Any]) -> bool:
    """Whether a module namespace is a program of Open-Jev, imported or run with `python -m`."""
    return any(_is(program, namespace) for program in PROGRAMS)


def _is(program: str, namespace: dict[str, Any]) -> bool:
    return program in (namespace.get("__name__"), getattr(namespace.get("__spec__"), "name", None))


class _Choices:
    """What `--backend` takes: what the host's own does, then ours. The plugins of others are loaded once a
    name is asked for that is none of these, or the help."""

    def __init__(self, host: Iterable = ()):
        self.host = tuple(host)
        self._ours = list(BUILT_IN)

    def __iter__(self) -> Iterator:
        return iter(dict.fromkeys([*self.host, *self._ours]))

    def __contains__(self, name: Any) -> bool:
        if name in [*self]:
            return True
        failed = self.load()
        if name in [*self]:
            return True
        for plugin_name, reason in failed.items():
            log.warning("openjev-fast: plugin %r failed to load: %s", plugin_name, reason)
        return False

    def load(self) -> dict[str, str]:
        """Find everybody's names; returns why a plugin offers none, by the plugin's name."""
        try:
            from . import plugin

            self._ours = plugin.names()
            return plugin.load_failures()
        except Exception as error:
            log.warning("openjev-fast: plugins cannot be listed: %s", error)
            return {}


def _add_flag(parser) -> argparse.Action:
    """The flag, or the host's own with our choices added."""
    action = parser._option_string_actions.get("--backend")
    if action is None:
        choices = _Choices()
        action = parser.add_argument("--backend", choices=choices, default=argparse.SUPPRESS, help=HELP)
        _yield_abbreviations(parser, action)
    elif action.choices is None or isinstance(action.choices, _Choices):
        # A host that takes any value already takes ours.
        return action
    else:
        choices = action.choices = _Choices(action.choices)
    format_help = parser.format_help

    def format_help_with_all_choices():
        choices.load()
        return format_help()

    parser.format_help = format_help_with_all_choices
    return action


def _yield_abbreviations(parser, action: argparse.Action) -> None:
    """An abbreviation that means a flag of the host goes on meaning that flag."""
    matches = parser._get_option_tuples

    def without_ours(option_string):
        found = matches(option_string)
        return [match for match in found if match[0] is not action] or found

    parser._get_option_tuples = without_ours


def _add_warmup(parser) -> None:
    """The flag, unless the host has one of this name."""
    if "--warmup" not in parser._option_string_actions:
        action = parser.add_argument(
            "--warmup", metavar="ROWS|FILE", dest=_WARMUP, default=argparse.SUPPRESS, help=WARMUP_HELP
        )
        _yield_abbreviations(parser, action)


def _parse(original, warms_up, parser, args, namespace, *rest, **more):
    global _parsed, _warmup, host_choices
    action = _add_flag(parser)
    if warms_up:
        _add_warmup(parser)
    host_choices = action.choices.host if isinstance(action.choices, _Choices) else ()

    # A value that parsing leaves in place was not typed; then the host's default goes where it would have.
    namespace = argparse.Namespace() if namespace is None else namespace
    if not hasattr(namespace, action.dest):
        setattr(namespace, action.dest, _UNTYPED)
    parsed, extras = original(parser, args, namespace, *rest, **more)
    typed = getattr(parsed, action.dest, _UNTYPED) is not _UNTYPED
    selection = resolve(flag=getattr(parsed, action.dest) if typed else None)
    if not typed:
        if selection is not None and action.choices is not None and selection.name not in action.choices:
            raise SystemExit(
                f"openjev-fast: {origin(selection)}: {parser.prog} has no backend {selection.name!r}: "
                f"choose from {', '.join(map(str, action.choices))}"
            )
        _set_default(parser, action, parsed, selection)
    _parsed = _Parsed(getattr(parsed, action.dest, None), typed)
    _warmup = vars(parsed).pop(_WARMUP, None)

    if failures and _warmup is not None:
        parser.error(_cannot(f"--warmup {_warmup}"))
    if failures and selection is not None and selection.name != ORIGINAL and not is_host_s(selection.name):
        parser.error(_stop(selection))
    return parsed, extras


def _set_default(parser, action, parsed, selection: Selection | None) -> None:
    delattr(parsed, action.dest)
    default = parser._defaults.get(action.dest, action.default)
    if selection is not None and is_host_s(selection.name):
        # The host's own choice is the host's to follow, whoever made it.
        default = selection.name
    if default is not argparse.SUPPRESS:
        setattr(
            parsed, action.dest, parser._get_value(action, default) if isinstance(default, str) else default
        )


def is_host_s(name: str) -> bool:
    """Whether the program that was started has a backend of this name that is none of ours: the host's to run."""
    return name in host_choices and (name == ORIGINAL or name not in BUILT_IN)


def split(backend: str | None) -> tuple[str | None, str | None]:
    """(flag, argument) behind the `backend` that reached `load_predictor`; an untyped default is neither.

    A typed flag counts once, for the call that follows the parsing, also where the host does not pass it on.
    """
    global _parsed
    parsed, _parsed = _parsed, None
    if parsed is None or (backend is not None and backend != parsed.value):
        return None, backend
    return (parsed.value, None) if parsed.typed else (None, None)


def take_warmup() -> str | None:
    """What was typed behind `--warmup`; like a typed backend it counts once, for the call that follows the parsing."""
    global _warmup
    typed, _warmup = _warmup, None
    return typed


# Failed patches

# What stays usable, and is guarded, when its patch fails: module -> attribute path.
_GUARDED = {"jev.serving": ("load_predictor",), "jev.model": ("DecisionModel", "load")}


def failed(name: str, module: Any, error: Exception) -> Callable[[], None]:
    """Note a failed patch. Its function goes on as it is, unless a backend is asked for: then it stops.

    Returns the undo. Raises only if there is no function to guard and the environment asks for a backend."""
    failures[name] = (
        str(error)
        if isinstance(error, BackendError)
        else (f"{name}: the patch failed with {type(error).__name__}: {error}")
    )
    log.debug("openjev-fast: %s", failures[name])

    def forget():
        failures.pop(name, None)

    if name not in _GUARDED or module is None:
        return forget
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
        return forget
    guarded = _guard(inner, takes_backend=name == "jev.serving")
    replacement = type(known)(guarded) if isinstance(known, classmethod | staticmethod) else guarded
    setattr(holder, attribute, replacement)

    def undo():
        forget()
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
        if selection is not None and selection.name != ORIGINAL and not is_host_s(selection.name):
            stop(BackendError(_stop(selection)), sys._getframe(1))
        if around is None and takes_backend:
            with decided(None):
                return function(*args, **arguments)
        return function(*args, **arguments)

    return guarded


def _stop(selection: Selection) -> str:
    return _cannot(origin(selection))


def _cannot(asked: str) -> str:
    reasons = "; ".join(failures.values())
    return f"{asked} cannot be used with this Open-Jev: {reasons}. Without it, it runs as before."


def stop(error: BackendError, caller: Any) -> None:
    """Raise `error`: as the last line of a program of Open-Jev, as an exception for everybody else."""
    if is_program(caller.f_globals):
        raise SystemExit(f"openjev-fast: {error}") from None
    raise error
