"""The requests that benchmarks time, in Open-Jev's request format; text is drawn from a seed or the demo's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from openjev_fast_plugin.demo import EXAMPLE

_WORDS = (
    "the customer asks about an order that left the warehouse on Monday and was seen at a depot in another town "
    "before it came back with a broken seal and a note that nobody at the desk could read or explain"
).split()

Length = Callable[[dict[str, Any]], int]


def _text(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def example() -> dict[str, Any]:
    """The demo's customer conversation: routing 1 of 3, refund yes or no, urgency of 3 levels."""
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def sized(question: dict[str, Any], tokens: int, longest_prompt: Length) -> dict[str, Any]:
    """A question about a state that makes the longest prompt about `tokens` long, and no longer.

    longest_prompt: tokens of a request's longest prompt, by the model's tokenizer.
    """

    def about(words: int) -> dict[str, Any]:
        return {"state": _text(words, 0), "questions": {"answer": question}}

    return about(_most_words(tokens, lambda words: longest_prompt(about(words))))


def request_for(case: str, longest_prompt: Length) -> dict[str, Any]:
    """The request of a case: `example`, `noul_<tokens>` or `choice_<options>x<tokens>`; `longest_prompt` as above."""
    if case == "example":
        return example()
    kind, size = case.split("_")
    if kind == "noul":
        question: dict[str, Any] = {"type": "noul", "instructions": "Is the parcel lost?"}
        return sized(question, int(size), longest_prompt)
    options, tokens = (int(number) for number in size.split("x"))
    criteria = {f"option {index:02d}": _text(5, index) for index in range(options)}
    instructions = "Which of these answers the customer best?"
    question = {"type": "choice", "instructions": instructions, "criteria": criteria}
    return sized(question, tokens, longest_prompt)


def nouls(tokens: int, longest_prompt: Length, seeds: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Yes-or-no questions, each prompt about `tokens` long: as many words as the first one takes to be that long.

    seeds: of state and question of each; equal seeds give equal texts. longest_prompt: as for `sized`.
    """

    def request(words: int, state: int, question: int) -> dict[str, Any]:
        instructions = f"Is this so: {_text(8, question)}?"
        return {
            "state": _text(words, state),
            "questions": {"answer": {"type": "noul", "instructions": instructions}},
        }

    words = _most_words(tokens, lambda words: longest_prompt(request(words, *seeds[0])))
    return [request(words, state, question) for state, question in seeds]


def _most_words(tokens: int, length: Callable[[int], int]) -> int:
    """The most words with which `length` stays at or under `tokens`."""
    low, high = 1, tokens
    while low < high:
        words = (low + high + 1) // 2
        low, high = (words, high) if length(words) <= tokens else (low, words - 1)
    return low
