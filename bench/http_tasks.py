"""Tasks asked one by one over HTTP: the client, rows of a results file, and two such files task by task.

Rows of scope `pass` are one round over the tasks: {mode, pass, tasks, errors, p50_ms, p95_ms, mean_ms, min_ms, max_ms,
server}. Rows of scope `task` are one task: {mode, id, tier, kind, ms: one per pass, decision, margin, probabilities,
error}, and `correct` and `expected` where there is a right answer.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openjev_fast_plugin.demo import probabilities

ROUTE = "/v1/systemone"
_SECONDS = 600.0


class Client:
    """Requests to one server. keep: one connection for all of them, where the server keeps it; else a new one each."""

    def __init__(self, url: str, keep: bool = False):
        address = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if address.scheme not in kinds or not address.hostname:
            raise ValueError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8791")
        self._connection = kinds[address.scheme](address.hostname, address.port, timeout=_SECONDS)
        self._prefix, self._keep = address.path.rstrip("/"), keep

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The answer and the milliseconds from before connecting to its last byte.

        OSError or ValueError, with the server's words, where there is no answer.
        """
        body = json.dumps(request).encode()
        start = time.perf_counter()
        status, answer = self._send("POST", ROUTE, body)
        milliseconds = 1e3 * (time.perf_counter() - start)
        if status != 200:
            raise ValueError(f"status {status}: {answer[:300].decode(errors='replace')}")
        return json.loads(answer), milliseconds

    def health(self) -> dict[str, Any]:
        """What the server says of itself; OSError or ValueError where it says nothing."""
        status, answer = self._send("GET", "/health", None)
        if status != 200:
            raise ValueError(f"GET /health: status {status}")
        return json.loads(answer)

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if not self._keep:
            headers["Connection"] = "close"
        try:
            self._connection.request(method, self._prefix + path, body, headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise error if isinstance(error, OSError) else OSError(repr(error)) from error
        finally:
            if not self._keep:
                self._connection.close()


def figures(milliseconds: list[float]) -> dict[str, float | None]:
    """Percentiles, mean and extremes of a distribution, to the microsecond; None without any."""
    if not milliseconds:
        return dict.fromkeys(("p50_ms", "p95_ms", "mean_ms", "min_ms", "max_ms"))
    cuts = milliseconds * 2 if len(milliseconds) == 1 else milliseconds
    percentiles = statistics.quantiles(cuts, n=100, method="inclusive")
    found = {
        "p50_ms": percentiles[49],
        "p95_ms": percentiles[94],
        "mean_ms": statistics.fmean(milliseconds),
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
    }
    return {name: round(value, 3) for name, value in found.items()}


def by_label(answer: dict[str, Any]) -> dict[str, float]:
    """The probabilities of a typed answer over all it could have been."""
    found = probabilities(answer)
    return {"no": 1 - found["yes"], **found} if answer["type"] == "noul" else found


def decided(found: dict[str, float]) -> dict[str, Any]:
    """What is decided by these probabilities, and how far it is ahead of the next."""
    ordered = sorted(found.values(), reverse=True)
    return {
        "decision": max(found, key=found.__getitem__),
        "margin": ordered[0] - (ordered[1] if len(ordered) > 1 else 0.0),
        "probabilities": found,
    }


# Two results files


@dataclass(frozen=True)
class Results:
    """One mode's rows of a results file."""

    name: str
    passes: list[dict[str, Any]]
    tasks: dict[str, dict[str, Any]]


def results(name: str, rows: Iterable[dict[str, Any]], mode: str | None = None) -> Results:
    """The rows of one mode, the first one where none is named. ValueError where the file has no such rows."""
    kept = [row for row in rows if row.get("scope") in ("pass", "task")]
    mode = mode or (kept[0]["mode"] if kept else None)
    tasks = {row["id"]: row for row in kept if row["scope"] == "task" and row["mode"] == mode}
    if not tasks:
        raise ValueError(f"{name} has no tasks of mode {mode!r}")
    passes = [row for row in kept if row["scope"] == "pass" and row["mode"] == mode]
    return Results(f"{name}, {mode}", passes, tasks)


def read_results(given: str) -> Results:
    """The results in FILE or FILE:MODE; ValueError where they cannot be read."""
    file, mode = given, None
    if not Path(given).exists() and ":" in given:
        file, _, mode = given.rpartition(":")
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a results file: {error!r}") from error
    return results(file, rows, mode)


def compare(one: Results, other: Results) -> dict[str, Any]:
    """Two runs over the tasks that both answered.

    Returns {tasks, changed: [{id, one, other, one_margin, other_margin, one_correct, other_correct}],
    largest_probability_difference, correct: [of one, of the other] or None}.
    """
    common = [
        (row, other.tasks[name])
        for name, row in one.tasks.items()
        if name in other.tasks and not row["error"] and not other.tasks[name]["error"]
    ]
    changed = [
        {
            "id": mine["id"],
            **{
                f"{whose}{what}": row[key]
                for whose, row in (("one", mine), ("other", theirs))
                for what, key in (("", "decision"), ("_margin", "margin"), ("_correct", "correct"))
                if key in row
            },
        }
        for mine, theirs in common
        if mine["decision"] != theirs["decision"]
    ]
    differences = [
        abs(value - theirs["probabilities"][label])
        for mine, theirs in common
        for label, value in mine["probabilities"].items()
    ]
    judged = common and all("correct" in row for pair in common for row in pair)
    return {
        "tasks": len(common),
        "changed": changed,
        "largest_probability_difference": max(differences, default=None),
        "correct": [sum(pair[side]["correct"] for pair in common) for side in (0, 1)] if judged else None,
    }


def render_comparison(one: Results, other: Results) -> str:
    """Two runs for a person to read: latencies by pass, then every decision that changed."""
    found = compare(one, other)
    lines = [f"one: {one.name}", f"other: {other.name}", "", _LATENCY_HEAD]
    for name, run in (("one", one), ("other", other)):
        lines += [latency_line(name, row) for row in run.passes]
    difference = found["largest_probability_difference"]
    lines += [
        "",
        f"{len(found['changed'])} of {found['tasks']} decisions changed; largest probability difference "
        + ("none" if difference is None else f"{difference:.6f}"),
    ]
    if found["correct"] is not None:
        lines.append("right: {} and {}".format(*found["correct"]))
    for each in found["changed"]:
        sides = [
            f"{each[side]!r} (margin {each[f'{side}_margin']:.4f}{_right(each.get(f'{side}_correct'))})"
            for side in ("one", "other")
        ]
        lines.append(f"  {each['id']}: {sides[0]} became {sides[1]}")
    return "\n".join(lines)


def _right(correct: bool | None) -> str:
    return "" if correct is None else ", right" if correct else ", wrong"


_LATENCY_HEAD = (
    f"{'':<10}{'pass':>5}{'tasks':>7}{'errors':>8}{'p50 ms':>10}{'p95 ms':>10}{'mean ms':>10}{'max ms':>10}"
    f"{'overhead':>10}"
)


def latency_table(passes: Iterable[dict[str, Any]]) -> str:
    """Rows of scope `pass` as a table."""
    return "\n".join([_LATENCY_HEAD, *(latency_line(row["mode"], row) for row in passes)])


def latency_line(name: str, row: dict[str, Any]) -> str:
    """One line of that table; overhead: the median of what clients waited beyond the forward."""
    columns = [row.get(key) for key in ("p50_ms", "p95_ms", "mean_ms", "max_ms", "overhead_p50_ms")]
    shown = "".join(f"{'' if value is None else format(value, '.1f'):>10}" for value in columns)
    return f"{name:<10}{row['pass']:>5}{row['tasks']:>7}{row['errors']:>8}{shown}"
