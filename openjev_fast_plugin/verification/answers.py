"""Typed answers request by request: probabilities, decisions with their margins, and thresholds between the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case, candidates

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# The largest difference of a probability: in the original's own largest distance to float32, and at least.
DIFFERENCE, LEAST_DIFFERENCE = 3.0, 0.01
# The margin up to which a decision may change, in the same unit: both probabilities of both models are off by it.
MARGIN, LEAST_MARGIN = 4.0, 0.005
FLOAT32_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """One question: its possible answers' probabilities, by the names a server gives them."""

    request: str
    question: str
    kind: str
    names: list[str]
    original: np.ndarray
    backend: np.ndarray
    # None where no float32 forward was made.
    golden: np.ndarray | None

    @property
    def difference(self) -> float:
        """The largest difference of a probability; infinite where there is none to speak of."""
        return float(np.nan_to_num(np.abs(self.original - self.backend).max(), nan=np.inf))

    @property
    def noise(self) -> float | None:
        """The original's largest distance to float32."""
        return None if self.golden is None else float(np.abs(self.original - self.golden).max())

    @property
    def decisions(self) -> tuple[str, str]:
        """What the original and the backend answer."""
        return self.names[int(self.original.argmax())], self.names[int(self.backend.argmax())]

    @property
    def margins(self) -> tuple[float, float]:
        """How far the original's and the backend's answer is ahead of the next."""
        return _margin(self.original), _margin(self.backend)

    def crossed(self) -> list[float]:
        """Thresholds with a probability on one side by the original and on the other by the backend."""
        shown = slice(1, None) if self.kind == "noul" else slice(None)
        return [
            at for at in THRESHOLDS if ((self.original[shown] >= at) != (self.backend[shown] >= at)).any()
        ]


def _margin(probabilities: np.ndarray) -> float:
    if len(probabilities) == 1:
        return 1.0
    second, first = np.sort(probabilities)[-2:]
    return float(first - second)


def answers(
    case: Case, temperature: float, original: np.ndarray, backend: np.ndarray, golden: np.ndarray | None
) -> list[Answer]:
    """The answers of one request from its prompts' scores [C]."""
    found, first = [], 0
    for record in case.records:
        span = slice(first, first + candidates(record))
        first = span.stop
        rows = [
            None if scores is None else _probabilities(record, scores[span], temperature)
            for scores in (original, backend, golden)
        ]
        names = ["no", "yes"] if record["kind"] == "noul" else list(record["answer_keys"])
        assert rows[0] is not None and rows[1] is not None
        found.append(Answer(case.name, record["id"], record["kind"], names, rows[0], rows[1], rows[2]))
    return found


def _probabilities(record: dict[str, Any], scores: np.ndarray, temperature: float) -> np.ndarray:
    from jev.metrics import softmax

    logits = [0.0, *scores.tolist()] if record["kind"] == "noul" else scores.tolist()
    if not np.isfinite(logits).all():
        return np.full(len(logits), np.nan)
    return np.array(softmax(logits, temperature))


def judge(found: list[Answer], in_float32: bool) -> dict[str, Any]:
    """What the answers' level reports: the largest difference, changed decisions, crossed thresholds, failures."""
    noise = max((answer.noise for answer in found if answer.noise is not None), default=0.0)
    allowed = FLOAT32_DIFFERENCE if in_float32 else max(DIFFERENCE * noise, LEAST_DIFFERENCE)
    margin = FLOAT32_DIFFERENCE if in_float32 else max(MARGIN * noise, LEAST_MARGIN)
    changed = [answer for answer in found if answer.decisions[0] != answer.decisions[1]]
    failures = [
        {
            "place": f"{answer.request}: question {answer.question!r}",
            "what": "probability difference",
            "found": answer.difference,
            "bound": allowed,
        }
        for answer in found
        if not answer.difference <= allowed
    ]
    failures += [
        {
            "place": f"{answer.request}: question {answer.question!r}",
            "what": f"decision changed from {answer.decisions[0]!r} to {answer.decisions[1]!r}, original's margin",
            "found": answer.margins[0],
            "bound": margin,
        }
        for answer in changed
        if not answer.margins[0] <= margin
    ]
    return {
        "questions": len(found),
        "largest_difference": max((answer.difference for answer in found), default=None),
        "original_to_float32": None if in_float32 else noise,
        "changed_decisions": [
            {
                "request": answer.request,
                "question": answer.question,
                "original": answer.decisions[0],
                "backend": answer.decisions[1],
                "original_margin": answer.margins[0],
                "backend_margin": answer.margins[1],
            }
            for answer in changed
        ],
        "thresholds_crossed": {
            f"{at:g}": [
                f"{answer.request}: question {answer.question!r}"
                for answer in found
                if at in answer.crossed()
            ]
            for at in THRESHOLDS
        },
        "by_request": {
            name: max(answer.difference for answer in found if answer.request == name)
            for name in dict.fromkeys(answer.request for answer in found)
        },
        "failures": failures,
    }
