"""`--warmup`: what a server does before its port opens, so that its first requests find everything made. No torch."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openjev_fast_plugin import warmup
from openjev_fast_plugin.console import each, say
from openjev_fast_plugin.settings import AUTO, BackendError

if TYPE_CHECKING:
    from openjev_fast_plugin.takeover import Takeover

# What Open-Jev answers 422.
_REFUSED = (ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Example:
    """A request as it is posted; where: its file and line."""

    where: str
    request: dict[str, Any]


@dataclass(frozen=True)
class WarmUp:
    """What to be ready for: requests, or prompts of so many rows.

    origin: how the user spelled it, for messages.
    """

    origin: str
    rows: list[int]
    examples: list[Example]

    def run(self, predict: Callable[[dict[str, Any]], Any], taken: Takeover) -> None:
        """Make a loaded model ready, and say on standard error what was done.

        predict: answers one request. taken: who computes that. Raises BackendError where a request is refused or fails,
        where no forward has so many rows, where the engine takes no sizes, or where what was tuned cannot be kept.
        """
        start = time.monotonic()
        prepare = getattr(taken.engine, "warm_up", None)
        if prepare is not None:
            try:
                counts = prepare(lambda: self._ask(predict), self.rows)
            except BackendError:
                raise
            except ValueError as error:
                raise BackendError(f"{self.origin}: {error}") from error
            except OSError as error:
                raise BackendError(
                    f"{self.origin}: what was measured cannot be kept: {error}; make that folder writable, or set "
                    "OPENJEV_FAST_TUNING=off"
                ) from error
        elif self.rows and taken.requested != AUTO:
            raise BackendError(
                f"{self.origin}: backend {taken.name!r} is warmed up with example requests: name a file of them"
            )
        else:
            if self.rows:
                say(f"openjev-fast: {self.origin}: sizes are for backend 'fast', not for {taken.name!r}")
            self._ask(predict)
            counts = {"requests": len(self.examples)}
        say(f"openjev-fast: warmed up in {time.monotonic() - start:.1f} s: {_summary(counts)}")

    def _ask(self, predict: Callable[[dict[str, Any]], Any]) -> None:
        for example in each(self.examples, "answering example requests", "request"):
            try:
                predict(example.request)
            except _REFUSED as error:
                raise BackendError(
                    f"{self.origin}: {example.where}: the server refuses this request: {_text(error)}"
                ) from error
            except Exception as error:
                raise BackendError(
                    f"{self.origin}: {example.where}: this request failed: {type(error).__name__}: {error}"
                ) from error


def read(text: str, origin: str) -> WarmUp:
    """What a text asks for: row counts as `warmup.parse_rows` reads them, else a file of requests.

    origin: how the user spelled it, for messages. Raises BackendError, naming the value and what would be right, for
    rows that are none, a file that cannot be read, and a request that Open-Jev refuses whatever the model.
    """
    if not text.strip():
        raise BackendError(
            f"{origin} is empty: name row counts, such as 72,280,8-512:64, or a file of requests"
        )
    if re.fullmatch(r"[\d\s,:-]+", text):
        try:
            return WarmUp(origin, warmup.parse_rows(text), [])
        except ValueError as error:
            raise BackendError(
                f"{origin}: {error}; rows are given as 72,280 or 8-512 or 8-512:64, a file of such a name as ./{text}"
            ) from None
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BackendError(
            f"{origin}: there is no file {str(path)!r}; give one of example requests, or rows such as 72,280,8-512:64"
        ) from None
    except (OSError, ValueError) as error:
        raise BackendError(f"{origin}: {path} cannot be read: {error}") from None
    try:
        examples = [_example(f"{path}, line {line}", value) for line, value in _values(content)]
    except _NotJson as error:
        raise BackendError(
            f"{origin}: {path}, {error}; give one request after another, {{...}} {{...}}, or an array of them"
        ) from None
    except _Refused as error:
        raise BackendError(f"{origin}: {error}") from None
    if not examples:
        raise BackendError(
            f"{origin}: {path} holds no request; give at least one, as it is posted to the server"
        )
    return WarmUp(origin, [], examples)


class _NotJson(ValueError):
    """The text is no JSON as the server reads it."""


class _Refused(ValueError):
    """Open-Jev refuses a request, whatever the model."""


def _example(where: str, value: Any) -> Example:
    from jev.api import compile_request

    if not isinstance(value, dict) or not {"state", "questions"} <= value.keys():
        raise _Refused(f"{where}: a request is an object with state and questions")
    try:
        compile_request(value["state"], value["questions"])
    except _REFUSED as error:
        raise _Refused(f"{where}: the server refuses this request: {_text(error)}") from None
    return Example(where, value)


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSON array, or of JSON texts one after another, each with the line it begins in.

    Raises _NotJson, also for what the server's own reading refuses: duplicate keys, NaN, infinities.
    """

    def line(place: int) -> int:
        return text.count("\n", 0, place) + 1

    def skipped(place: int) -> int:
        found = re.compile(r"[ \t\r\n]*").match(text, place)
        return place if found is None else found.end()

    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)
    place = skipped(0)
    array = text[place : place + 1] == "["
    if array:
        place = skipped(place + 1)
    # After "[" and after a value an array may end.
    first, ended = True, False
    while True:
        if array and text[place : place + 1] == "]":
            place, ended = skipped(place + 1), True
            break
        if place == len(text):
            break
        if array and not first:
            if text[place] != ",":
                raise _NotJson(f"line {line(place)}: expected ',' or ']'")
            place = skipped(place + 1)
        try:
            value, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise _NotJson(f"line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise _NotJson(f"line {line(place)}: {error}") from None
        yield line(place), value
        first, place = False, skipped(end)
    if array and not ended:
        raise _NotJson(f"line {line(place)}: the array does not end")
    if place != len(text):
        raise _NotJson(f"line {line(place)}: something follows the array")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _summary(counts: dict[str, int]) -> str:
    if "requests" in counts:
        return f"{counts['requests']} example requests answered"
    parts = [f"{counts['forwards']} forwards run"]
    if "tuned" in counts:
        parts.append(f"{counts['tuned']} matmuls tuned")
    if counts.get("attention"):
        parts.append("tile sizes of attention measured")
    if "captured" in counts:
        parts.append(f"{counts['captured']} of {counts['shapes']} shapes captured as CUDA graphs")
    else:
        parts.append("nothing here to tune or to capture")
    return ", ".join(parts)
