"""Every setting of the plugin, and the one place that reads the environment. Standard library only.

Which backend answers is decided by the first of these that says something:
    1. the command line (`--backend NAME`) or the argument (`load_predictor(..., backend=NAME)`),
    2. the environment (`OPENJEV_BACKEND=NAME`),
    3. the checkpoint (`"backend": "NAME"` in its `model.json`).
When none does, Open-Jev runs as if the plugin were not installed.
"""

import json
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BACKEND_VARIABLE = "OPENJEV_BACKEND"
MAX_ROWS_VARIABLE = "OPENJEV_FAST_MAX_ROWS"
TUNING_VARIABLE = "OPENJEV_FAST_TUNING"
SHARE_ROWS_VARIABLE = "OPENJEV_FAST_SHARE_ROWS"
QUEUE_VARIABLE = "OPENJEV_FAST_QUEUE"
QUEUE_ROWS_VARIABLE = "OPENJEV_FAST_QUEUE_ROWS"
WAIT_VARIABLE = "OPENJEV_FAST_WAIT_US"
PREFIX_BYTES_VARIABLE = "OPENJEV_FAST_PREFIX_BYTES"
PREFIX_ROWS_VARIABLE = "OPENJEV_FAST_PREFIX_ROWS"
ACCESS_LOG_VARIABLE = "OPENJEV_FAST_ACCESS_LOG"
WARMUP_VARIABLE = "OPENJEV_FAST_WARMUP"

_MOST_WAIT_US = 5000
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

# The name of the model as Open-Jev runs it, and of "the best that takes this model".
ORIGINAL, AUTO = "torch", "auto"

# Whether measured choices decide how matmuls and attention are computed on a GPU: not at all, those there are when the
# server starts, or also those made while it is idle.
TUNING = ("off", "tables", "idle")


class BackendError(RuntimeError):
    """A backend was asked for and cannot be used: the message says which, why, and the offending value."""


@dataclass(frozen=True)
class Selection:
    name: str
    # "flag", "argument", "environment" or "file".
    decided_by: str


@dataclass(frozen=True)
class Settings:
    # Packed rows one forward may hold; None: choose from the memory there is.
    max_rows: int | None = None
    # Rows that other requests may add to the forward of the one that waits longest; 0: none.
    share_rows: int = 1024
    # Requests that may be inside at once, and the rows they may ask for together; more are refused.
    queue: int = 256
    queue_rows: int = 131_072
    # Microseconds the device may stay free after a forward for those just answered to ask again; 0: it never does.
    wait_us: int = 0
    # Bytes of device memory in which prefixes are kept from one request to the next; 0: none are kept.
    prefix_bytes: int = 0
    # Shorter ones are not kept: what computing so few rows beside others takes is about what copying and, the first
    # time, launching the kernels of another shape take.
    prefix_rows: int = 256
    # The file that a line is appended to for every HTTP request; None: there is no such log.
    access_log: str | None = None
    # One of TUNING. Another choice sums in another order and rounds differently. Answers are decisions, so the default
    # makes none while it serves: the same request gives the same bits from a server's start to its end.
    tuning: str = "tables"
    # Row counts, or a file of example requests, that a server is made ready for before its port opens; None: for none.
    # The flag `--warmup` comes before it.
    warmup: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        numbers = {
            "max_rows": _number(environ, MAX_ROWS_VARIABLE, 1),
            "share_rows": _number(environ, SHARE_ROWS_VARIABLE, 0),
            "queue": _number(environ, QUEUE_VARIABLE, 1),
            "queue_rows": _number(environ, QUEUE_ROWS_VARIABLE, 1),
            "wait_us": _number(environ, WAIT_VARIABLE, 0, _MOST_WAIT_US),
            "prefix_bytes": _bytes(environ, PREFIX_BYTES_VARIABLE),
            # What is kept of the convolution's input is the last three rows.
            "prefix_rows": _number(environ, PREFIX_ROWS_VARIABLE, 3),
        }
        given = {name: value for name, value in numbers.items() if value is not None}
        tuning = _value(environ, TUNING_VARIABLE) or cls.tuning
        if tuning not in TUNING:
            raise BackendError(
                f"{TUNING_VARIABLE} must be {', '.join(TUNING[:-1])} or {TUNING[-1]}, found {reprlib.repr(tuning)}"
            )
        return cls(
            **given,
            access_log=_value(environ, ACCESS_LOG_VARIABLE),
            tuning=tuning,
            warmup=_value(environ, WARMUP_VARIABLE),
        )


def resolve(
    flag: str | None = None,
    argument: str | None = None,
    checkpoint: str | os.PathLike | None = None,
    environ: Mapping[str, str] | None = None,
) -> Selection | None:
    """The backend that was asked for and who asked, or None."""
    if flag is not None:
        return Selection(flag, "flag")
    if argument is not None:
        return Selection(argument, "argument")
    named = _value(environ, BACKEND_VARIABLE)
    if named is not None:
        return Selection(named, "environment")
    named = _backend_in_checkpoint(checkpoint) if checkpoint else None
    return None if named is None else Selection(named, "file")


def origin(selection: Selection) -> str:
    """How the user spelled a selection, for messages."""
    return {
        "flag": f"--backend {selection.name}",
        "argument": f"backend={selection.name!r}",
        "environment": f"{BACKEND_VARIABLE}={selection.name}",
        "file": f'"backend": "{selection.name}" in model.json',
    }[selection.decided_by]


def _value(environ: Mapping[str, str] | None, name: str) -> str | None:
    # An empty variable is an unset one.
    return (os.environ if environ is None else environ).get(name, "").strip() or None


def _number(environ: Mapping[str, str] | None, name: str, least: int, most: int = 10**18 - 1) -> int | None:
    """An integer from the environment; BackendError, naming variable and value, for anything else."""
    text = _value(environ, name)
    if text is None:
        return None
    # Python refuses to read thousands of digits as a number.
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= most):
        raise BackendError(f"{name} must be an integer from {least} to {most}, found {reprlib.repr(text)}")
    return int(text)


def _bytes(environ: Mapping[str, str] | None, name: str) -> int | None:
    """A number of bytes from the environment, with or without a unit; BackendError for anything else."""
    text = _value(environ, name)
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,15}) ?((?:[KMGT]iB)?)", text)
    if found is None:
        raise BackendError(
            f"{name} must be a whole number of bytes, KiB, MiB, GiB or TiB, such as 2GiB, found {reprlib.repr(text)}"
        )
    return int(found[1]) * _UNITS[found[2]]


def _backend_in_checkpoint(checkpoint: str | os.PathLike) -> str | None:
    path = Path(checkpoint) / "model.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Open-Jev reads the same file next and reports what is wrong with it.
        return None
    named = content.get("backend") if isinstance(content, dict) else None
    if named is None:
        return None
    if isinstance(named, str) and named.strip():
        return named.strip()
    raise BackendError(f'"backend" in {path} must be the name of a backend, found {reprlib.repr(named)}')
