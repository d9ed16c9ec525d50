"""Random requests for tests: hypothesis strategies and a seeded generator, in Open-Jev's request format."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

WORDS = (
    "invoice refund order late parcel customer asks reply agent manager account password reset bank card "
    "naïve 東京 emoji 🚚 Straße {json} <b> 4471 99.5% don't we'll \n\n \t -- ... ?! urgent please thanks"
).split(" ")


def text(words: int, seed: int) -> str:
    """Words drawn from a small vocabulary with punctuation, digits, newlines and several scripts."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def question(kind: str, options: int, seed: int) -> dict[str, Any]:
    """One typed question; options is ignored for a noul."""
    instructions = f"Question {seed}: {text(6, seed)}?"
    if kind == "choice":
        criteria: Any = {f"option {index} {text(2, seed + index)}": None for index in range(options)}
        for index, name in enumerate(criteria):
            criteria[name] = text(index % 5, index + seed) or None
    elif kind == "score":
        criteria = [f"level {index}: {text(3, seed + index)}" for index in range(options)]
    else:
        criteria = {"true": text(4, seed), "false": text(3, seed + 1)} if seed % 2 else None
    return {"type": kind, "instructions": instructions, "criteria": criteria}


@st.composite
def requests(draw: st.DrawFn, budget: int = 16_000) -> dict[str, Any]:
    """State of 1 to about 2,000 tokens, one to four questions, candidates x tokens at most about `budget`."""
    words = draw(st.one_of(st.integers(1, 60), st.integers(60, 700)))
    kind_of_state = draw(st.sampled_from(["text", "dict", "list"]))
    state: Any = text(words, draw(st.integers(0, 10_000)))
    if kind_of_state == "dict":
        state = {"conversation": state, "turns": words, "open": True}
    elif kind_of_state == "list":
        state = [{"from": "customer", "text": state}, None, 3.5]
    left = max(1, budget // (3 * words + 60))
    questions = {}
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["choice", "score", "noul"]))
        low, high = {"choice": (1, 255), "score": (2, 10), "noul": (1, 1)}[kind]
        if left < low:
            break
        options = draw(st.integers(low, min(high, left)))
        left -= options
        questions[f"q{index}"] = question(kind, options, draw(st.integers(0, 500)))
    return {"state": state, "questions": questions or {"q": question("noul", 1, 0)}}
