"""231 single-question tasks of the shape of JevBench's public ones, with text of our own drawn from a seed.

    python bench/workloads/jevbench_shaped.py > tasks.jsonl

JevBench (github.com/fstandhartinger/jevbench) is not redistributed here. What is known of its public tasks is kept: 72
original, 48 easy and 111 hard; 139 choice, 74 noul and 18 score; one question each; a state that is text or an object;
about 90 tasks whose longest prompt has 65 to 96 tokens, and a tail up to a choice of 4 with prompts of 2,680 tokens,
2,793 rows once shared text is computed once, 10,722 tokens. How the kinds fall on the tiers, and lengths between those
figures, are ours.

The text is made of common words and counted without a tokenizer, a token each; tests/test_workloads.py holds the
lengths with the tokenizer of random-weight checkpoints. The answers mean nothing: `expected` is drawn as well.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# Tasks by tier and kind.
COUNTS = {
    "original": {"choice": 36, "noul": 30, "score": 6},
    "easy": {"choice": 32, "noul": 12, "score": 4},
    "hard": {"choice": 71, "noul": 32, "score": 8},
}
# Tokens of the longest prompt: of the short tiers so many in each range, of the hard ones evenly by their logarithm.
SHORT = ((10, 55, 63), (90, 66, 95), (20, 98, 170))
HARD = (110, 2680)
# Tokens of a whole request, at most.
_MOST_TOKENS = 10_722
# Of a prompt beside its state, its question's text and its option's, by kind.
_FRAME = {"choice": 33, "score": 32, "noul": 30}
# Of every key of an object, with its quotes and commas.
_KEY = 5

_NOUNS = (
    "order invoice parcel customer account password card address delivery refund ticket team manager device update "
    "report contract payment message policy price product service request answer letter office agent"
).split()
_VERBS = (
    "asked said went came gave took made told called opened closed sent paid lost used knew got had showed left sold "
    "bought waited arrived returned refused received replied reviewed ordered handled promised expected"
).split()
_OTHERS = (
    "the a this that every another new old late early open missing wrong second first last large small again today "
    "before after because while with without about from for and but or not only still already never often"
).split()
_KEYS = ("notes", "history", "message", "summary", "request", "report", "answer", "details")


@dataclass(frozen=True)
class Task:
    """One question about one state. request: as the server takes it. expected: a drawn answer, for scoring alone."""

    id: str
    tier: str
    kind: str
    request: dict[str, Any]
    expected: str


def tasks(seed: int = 0) -> list[Task]:
    """All 231, tier after tier; the same from the same seed."""
    draw = random.Random(seed)
    short = [draw.randint(low, high) for count, low, high in SHORT for _ in range(count)]
    draw.shuffle(short)
    hard = sum(COUNTS["hard"].values())
    low, high = HARD
    long = [round(low * (high / low) ** (index / (hard - 1))) for index in range(hard)]
    lengths = {"original": short[:72], "easy": short[72:], "hard": long}
    return [task for tier in COUNTS for task in _tier(tier, lengths[tier], draw)]


def _tier(tier: str, lengths: list[int], draw: random.Random) -> Iterator[Task]:
    kinds = [kind for kind, count in COUNTS[tier].items() for _ in range(count)]
    draw.shuffle(kinds)
    if tier == "hard":
        # The longest is a choice.
        kinds.append(kinds.pop(kinds.index("choice")))
    for index, (kind, tokens) in enumerate(zip(kinds, lengths, strict=True)):
        most = _MOST_TOKENS // tokens
        if kind == "choice":
            options = most if index == len(kinds) - 1 and tier == "hard" else draw.randint(2, min(6, most))
        else:
            options = draw.randint(3, min(5, most)) if kind == "score" else 1
        yield _task(f"{tier}-{index:03d}", tier, kind, tokens, options, draw)


def _task(name: str, tier: str, kind: str, tokens: int, options: int, draw: random.Random) -> Task:
    """tokens: of its longest prompt, about."""
    asked = draw.randint(6, 9)
    # Short prompts have short options.
    described = 2 if tokens < 100 else draw.randint(8, 20)
    spent = _FRAME[kind] + asked + (0 if kind == "noul" else described + 2)
    criteria: Any
    if kind == "choice":
        names = draw.sample(_NOUNS, options)
        criteria = {each: _words(draw, described) for each in names}
        expected = draw.choice(names)
    elif kind == "score":
        criteria = [_words(draw, described + 1) for _ in range(options)]
        expected = str(draw.randrange(options))
    else:
        sides = draw.random() < 0.5 and tokens >= 100
        criteria = {"true": _words(draw, 5), "false": _words(draw, 5)} if sides else None
        spent += 16 if sides else 0
        expected = draw.choice(["yes", "no"])
    room = max(tokens - spent, 4)
    state: Any = _object(draw, room) if draw.random() < 0.4 and room >= 20 else _prose(draw, room)
    question = {"type": kind, "instructions": _words(draw, asked) + "?", "criteria": criteria}
    return Task(name, tier, kind, {"state": state, "questions": {"decision": question}}, expected)


def _words(draw: random.Random, count: int) -> str:
    """That many words."""
    groups = (_OTHERS, _NOUNS, _VERBS)
    return " ".join(draw.choice(groups[index % 3]) for index in range(count))


def _prose(draw: random.Random, tokens: int) -> str:
    """Sentences of about that many tokens."""
    sentences = []
    while tokens > 1:
        words = min(draw.randint(6, 14), tokens - 1)
        sentences.append(_words(draw, words) + ".")
        tokens -= words + 1
    return " ".join(sentences)


def _object(draw: random.Random, tokens: int) -> dict[str, Any]:
    """An object whose JSON has about that many tokens, its text under one to four keys."""
    keys = draw.sample(_KEYS, min(4, max(1, tokens // 60)))
    each = (tokens - _KEY * len(keys)) // len(keys)
    return {key: _prose(draw, each) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the text (default: 0)")
    for task in tasks(parser.parse_args().seed):
        print(json.dumps(asdict(task), ensure_ascii=False))


if __name__ == "__main__":
    main()
