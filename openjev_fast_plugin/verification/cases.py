"""The requests a verification asks, and what their prompts share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openjev_fast_plugin.console import UsageError
from openjev_fast_plugin.demo import EXAMPLE
from openjev_fast_plugin.prompts import PromptEncoder

_WORDS = (
    "the customer writes that an order from last week was packed with care but came to the wrong house and nobody at "
    "the desk could say where it had been since Monday so she asks for the money or a new one before Friday and adds "
    "that the invoice names 3 items while 2 were paid by card"
).split()


@dataclass(frozen=True)
class Case:
    """One request, compiled and tokenized.

    name: what a report calls it. records: as `jev.api.compile_request` returns them.
    sequences: token ids of every prompt, records and candidates in order.
    new_from: for each prompt, how many of its leading tokens an earlier prompt has too. The other tokens, over all
        prompts, are the distinct rows of the request, each once.
    """

    name: str
    records: list[dict[str, Any]]
    sequences: list[np.ndarray]
    new_from: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def rows(self) -> int:
        """Distinct prefixes of the prompts."""
        return self.tokens - sum(self.new_from)

    @property
    def own_sizes(self) -> list[int]:
        """For each prompt the tokens that no earlier one has."""
        return [len(sequence) - first for sequence, first in zip(self.sequences, self.new_from, strict=True)]

    def candidate(self, index: int) -> str:
        """A prompt by the question and the answer it stands for."""
        for record in self.records:
            count = candidates(record)
            if index < count:
                answer = "" if record["kind"] == "noul" else f", answer {record['answer_keys'][index]!r}"
                return f"question {record['id']!r}{answer}"
            index -= count
        raise IndexError(index)


def candidates(record: dict[str, Any]) -> int:
    """Prompts of one record."""
    return 1 if record["kind"] == "noul" else len(record["options"])


def compile_requests(requests: Sequence[tuple[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Records of named requests; UsageError for one that Open-Jev refuses, with its words."""
    from jev.api import compile_request

    found = []
    for name, request in requests:
        try:
            found.append((name, compile_request(request["state"], request["questions"])))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{name} is not a request that Open-Jev takes: {error!r}") from error
    return found


def tokenize(
    compiled: Sequence[tuple[str, list[dict[str, Any]]]], tokenizer: Any, max_length: int
) -> list[Case]:
    """Cases of named records; UsageError for a prompt longer than the checkpoint takes."""
    from jev.api import candidate_prompts

    encoder = PromptEncoder(tokenizer, candidate_prompts)
    cases = []
    for name, records in compiled:
        sequences = [sequence for group in encoder.encode(records) for sequence in group]
        longest = max(map(len, sequences))
        if longest > max_length:
            raise UsageError(f"{name} has a prompt of {longest} tokens, the checkpoint takes {max_length}")
        cases.append(Case(name, records, sequences, _new_from(sequences)))
    return cases


def _new_from(sequences: list[np.ndarray]) -> list[int]:
    """For each sequence the longest prefix that one before it has too."""
    return [
        max((_shared(sequence, other) for other in sequences[:index]), default=0)
        for index, sequence in enumerate(sequences)
    ]


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    limit = min(len(one), len(other))
    differs = np.flatnonzero(one[:limit] != other[:limit])
    return int(differs[0]) if len(differs) else limit


def read_requests(files: Sequence[Path]) -> list[tuple[str, Any]]:
    """The requests of JSON files, each an object as the server takes it or an array of such objects, with names."""
    found = []
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read as JSON: {error}") from error
        if isinstance(content, list):
            found += [(f"{file.name}[{index}]", request) for index, request in enumerate(content)]
        else:
            found.append((file.name, content))
    if not found:
        raise UsageError("the request files hold no request")
    return found


def default_requests(seed: int) -> list[tuple[str, Any]]:
    """The demo's example, and requests of every kind, short, wide and long, with text drawn from a seed."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(words))

    def choice(options: int, words: int) -> dict[str, Any]:
        criteria = {f"option {index}": text(words) or None for index in range(options)}
        return {"type": "choice", "instructions": f"Which one fits: {text(8)}?", "criteria": criteria}

    def score(levels: int) -> dict[str, Any]:
        criteria = [f"level {index}: {text(4)}" for index in range(levels)]
        return {"type": "score", "instructions": f"How much of this holds: {text(6)}?", "criteria": criteria}

    def noul(criteria: bool) -> dict[str, Any]:
        sides = {"true": text(5), "false": text(5)} if criteria else None
        return {"type": "noul", "instructions": f"Is it so that {text(7)}?", "criteria": sides}

    return [
        ("example", json.loads(EXAMPLE.read_text(encoding="utf-8"))),
        ("short yes or no", {"state": text(12), "questions": {"answer": noul(False)}}),
        ("choice of 6", {"state": text(110), "questions": {"answer": choice(6, 4)}}),
        (
            "score of 4",
            {"state": [{"from": "customer", "text": text(40)}], "questions": {"answer": score(4)}},
        ),
        ("choice of 24", {"state": text(20), "questions": {"answer": choice(24, 0)}}),
        (
            "three questions",
            {
                "state": {"ticket": 4471, "conversation": text(60), "open": True},
                "questions": {"team": choice(4, 3), "refund": noul(True), "urgency": score(3)},
            },
        ),
        ("long yes or no", {"state": text(400), "questions": {"answer": noul(True)}}),
    ]
