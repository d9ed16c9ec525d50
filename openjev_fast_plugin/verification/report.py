"""A verification for a person to read: what passed, what failed and where, and what to do next."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from .run import LEVELS

# Failures of one level that are shown; the JSON form has all.
_SHOWN = 5

_TITLES = {
    "preparation": "preparation: prompts, trees, weights",
    "ops": "ops: each against its reference, on this model's activations",
    "states": "states: hidden states after every layer",
    "answers": "answers: request by request",
}
_MEANINGS = {
    "preparation": "What the ops are given is not what the original computes on, so the levels after it fail too. A "
    "wrong weight: compare the checkpoint's files with where they came from, and memory with another machine's. A "
    "wrong prompt or tree is a fault of the plugin.",
    "ops": "The op named first does not compute or round what its reference does. On a GPU, remove "
    "~/.cache/openjev-fast-plugin to have the kernels built anew. Then run once more with --float32: a fault of the "
    "maths shows there too, one of rounding does not.",
    "states": "Every op that was checked agrees with its reference and the weights are the original's, so the fault is "
    "in how the ops are put together, from the first layer named on. Run once more with --float32 to see whether it "
    "is one of the maths.",
    "answers": "Hidden states are as close as the original's, so the fault comes after them: the head, or what a "
    "repeated request finds left over from the one before.",
}
_NEXT = (
    "Until it is found, serve with --backend torch, the original, and report the fault with the output of "
    "`openjev-fast verify --json`."
)


def render(result: dict[str, Any]) -> str:
    """The result of `run` as text."""
    backend, requests, levels = result["backend"], result["requests"], result["levels"]
    prompts, tokens, rows = (
        sum(request[key] for request in requests) for key in ("prompts", "tokens", "rows")
    )
    memory = result["memory"]
    lines = [
        f"{result['checkpoint']}: backend {backend['name']} in {result['dtype']} on {backend['device']}, "
        f"kernels {backend['kernels']}",
        f"{len(requests)} requests, {prompts} prompts of {tokens} tokens, {rows} distinct rows",
        f"loaded {memory['order']}, {_size(memory['model_bytes'])} each where {_size(memory['free_bytes'])} were free; "
        f"{_size(memory['host_bytes'])} of hidden states wait on the host",
    ]
    left_out = [request["name"] for request in requests if not request["states_compared"]]
    if left_out:
        lines.append(f"hidden states not compared, for want of memory: {', '.join(left_out)}")
    for name in LEVELS:
        level = levels[name]
        status = {True: "pass", False: "FAIL", None: "skipped"}[level["passed"]]
        lines += ["", f"{status:<8}{_TITLES[name]}"]
        if level["skipped"]:
            lines.append(f"        {level['skipped']}")
            continue
        allowed = f"allowed: {result['tolerances'][name]}"
        lines += textwrap.wrap(allowed, 112, initial_indent=" " * 8, subsequent_indent=" " * 10)
        lines += [f"        {line}" for line in _DETAILS[name](level)]
        lines += [f"        FAIL {_failure(failure)}" for failure in level["failures"][:_SHOWN]]
        more = len(level["failures"]) - _SHOWN
        if more > 0:
            lines.append(f"        and {more} more, all of them in --json")
    failed = result["failed_level"]
    if failed is None:
        skipped = [name for name in LEVELS if levels[name]["passed"] is None]
        return "\n".join([*lines, "", f"PASS{', without ' + ', '.join(skipped) if skipped else ''}"])
    first = levels[failed]["failures"][0]
    advice = textwrap.wrap(f"{_MEANINGS[failed]} {_NEXT}", 120)
    return "\n".join([*lines, "", f"FAIL at {failed}: {_failure(first)}", *advice])


def finite(value: Any) -> Any:
    """The result with numbers that JSON has no form for as text, "inf" or "nan"."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _preparation(level: dict[str, Any]) -> list[str]:
    counts = [f"{level['prompts']} prompts"]
    if "trees" in level:
        counts.append(f"{level['trees']} trees")
    return [", ".join([*counts, f"{level['weight_rows']} rows of weights"])]


def _ops(level: dict[str, Any]) -> list[str]:
    lines = [f"layers {', '.join(map(str, level['layers']))}; of every op the figure nearest to its bound:"]
    for name, op in level["ops"].items():
        worst = op["worst"]
        if worst is not None:
            figure = _figure(worst["what"], worst["found"], worst["bound"], worst["at_least"])
            lines.append(f"{name:<18}{op['calls']:>4} calls  {figure} ({worst['output']}, {worst['place']})")
    return lines


def _states(level: dict[str, Any]) -> list[str]:
    rows = level["layers"]
    if "ratio" not in rows[0]:
        return [
            f"{'layer':>5}  relative L2 to the original",
            *(f"{row['layer']:>5}  {row['relative_l2']:.2e}{_mark(row)}" for row in rows),
        ]
    lines = [
        "relative L2 over all rows; ratio: of a row's distances to float32, geometric mean; the furthest prompt's",
        f"{'layer':>5}{'to original':>13}{'original to float32':>21}{'backend to float32':>20}"
        f"{'ratio':>8}{'furthest':>10}",
    ]
    return lines + [
        f"{row['layer']:>5}{row['relative_l2']:>13.2e}{row['original_to_float32']:>21.2e}"
        f"{row['backend_to_float32']:>20.2e}{row['ratio']:>8.3f}{row['furthest_ratio']:>10.2f}{_mark(row)}"
        for row in rows
    ]


def _mark(row: dict[str, Any]) -> str:
    return "" if row["passed"] else "  FAIL"


def _answers(level: dict[str, Any]) -> list[str]:
    lines = [
        f"{name:<24}largest probability difference {value:.2e}" for name, value in level["by_request"].items()
    ]
    if level["original_to_float32"] is not None:
        lines.append(f"the original's own largest distance to float32 is {level['original_to_float32']:.2e}")
    changed = level["changed_decisions"]
    lines.append(f"{len(changed)} of {level['questions']} decisions changed")
    for each in changed:
        original = f"{each['original']!r} (margin {each['original_margin']:.4f})"
        backend = f"{each['backend']!r} (margin {each['backend_margin']:.4f})"
        lines.append(f"{each['request']}, question {each['question']!r}: {original} became {backend}")
    crossed = {at: places for at, places in level["thresholds_crossed"].items() if places}
    lines.append(
        f"thresholds {', '.join(level['thresholds_crossed'])}: {'crossed' if crossed else 'none crossed'}"
    )
    lines += [f"  {at} in {', '.join(places)}" for at, places in crossed.items()]
    if level["replayed"]:
        lines.append(
            f"asked twice, {level['replayed']} of {level['asked']} requests answered by a captured graph"
        )
    return lines


def _failure(failure: dict[str, Any]) -> str:
    if failure["found"] is None:
        return f"{failure['place']}: {failure['what']}"
    return f"{failure['place']}: {_figure(failure['what'], failure['found'], failure['bound'], failure['at_least'])}"


def _figure(what: str, found: float, bound: float, at_least: bool) -> str:
    return f"{what} {found:.4g}, {'at least' if at_least else 'at most'} {bound:.4g}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_DETAILS = {"preparation": _preparation, "ops": _ops, "states": _states, "answers": _answers}
