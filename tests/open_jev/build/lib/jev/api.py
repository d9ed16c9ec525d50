"""Stand-in for Open-Jev (see `jev/__init__.py`): requests to records, prompts and typed answers.

A record is one question, ready for the model: `{id, state, kind, question, options, answer_keys}` and,
for a score, `legend`. This module does not import torch.
"""

import json
import math
from typing import Any

from .metrics import choice_confidence, score_confidence

KINDS = ("choice", "score", "noul")
MAX_OPTIONS = 255
MIN_LEVELS, MAX_LEVELS = 2, 10


def compile_request(state: Any, questions: dict[str, dict]) -> list[dict]:
    """One record per question, in order. ValueError names the question that is wrong."""
    if not isinstance(state, (str, dict, list)):
        raise ValueError("state must be a string, an object or an array")
    if not isinstance(questions, dict) or not questions:
        raise ValueError("questions must be an object with at least one question")
    return [_compile_question(state, name, question) for name, question in questions.items()]


def candidate_prompts(record: dict) -> list[str]:
    """The user turns of one record: one per option, or a single one for a noul."""
    head = f"Context:\n{_text(record['state'])}\n\nQuestion: {record['question']}\n"
    if record["kind"] == "noul":
        return [head + "Is the answer to this question yes? Answer Yes or No."]
    ask = "Is this proposed answer correct? Answer Yes or No."
    return [f"{head}Proposed answer: {option}\n{ask}" for option in record["options"]]


def format_response(records: list[dict], probabilities: list[list[float]]) -> dict:
    """`{"answers": {id: answer}}`. ValueError unless each row is a distribution over its record's answers."""
    if len(records) != len(probabilities):
        raise ValueError("one probability row per question is required")
    answers = {}
    for record, row in zip(records, probabilities, strict=True):
        _check_distribution(record, row)
        answers[record["id"]] = _answer(record, row)
    return {"answers": answers}


def _compile_question(state: Any, name: str, question: dict) -> dict:
    if not isinstance(name, str) or not name:
        raise ValueError("question ids must be non-empty strings")
    if not isinstance(question, dict):
        raise ValueError(f"question {name!r} must be an object")
    kind = question.get("type")
    if kind not in KINDS:
        raise ValueError(f"question {name!r}: type must be one of {', '.join(KINDS)}")
    instructions = question.get("instructions")
    if not isinstance(instructions, (str, dict, list)) or not instructions:
        raise ValueError(f"question {name!r}: instructions are required")
    record = {"id": name, "state": state, "kind": kind, "question": _text(instructions)}
    compile_kind = {"choice": _compile_choice, "score": _compile_score, "noul": _compile_noul}[kind]
    return compile_kind(record, question.get("criteria"))


def _compile_choice(record: dict, criteria: Any) -> dict:
    if not isinstance(criteria, dict) or not 1 <= len(criteria) <= MAX_OPTIONS:
        raise ValueError(
            f"question {record['id']!r}: choice criteria must be an object, 1 to {MAX_OPTIONS} options"
        )
    for option, description in criteria.items():
        if not option or not (description is None or isinstance(description, (str, dict, list))):
            raise ValueError(f"question {record['id']!r}: options are names with a text or null")
    options = [name if value is None else f"{name}: {_text(value)}" for name, value in criteria.items()]
    return {**record, "options": options, "answer_keys": list(criteria)}


def _compile_score(record: dict, criteria: Any) -> dict:
    if not isinstance(criteria, list) or not MIN_LEVELS <= len(criteria) <= MAX_LEVELS:
        allowed = f"{MIN_LEVELS} to {MAX_LEVELS} levels"
        raise ValueError(f"question {record['id']!r}: score criteria must be an array of {allowed}")
    if not all(isinstance(level, (str, dict, list)) and level for level in criteria):
        raise ValueError(f"question {record['id']!r}: every level needs a text")
    options = [_text(level) for level in criteria]
    keys = [str(index) for index in range(len(options))]
    return {
        **record,
        "options": options,
        "answer_keys": keys,
        "legend": dict(zip(keys, options, strict=True)),
    }


def _compile_noul(record: dict, criteria: Any) -> dict:
    if criteria is not None:
        if not isinstance(criteria, dict) or set(criteria) != {"true", "false"}:
            raise ValueError(f"question {record['id']!r}: noul criteria need both true and false, or null")
        if not all(isinstance(text, (str, dict, list)) and text for text in criteria.values()):
            raise ValueError(f"question {record['id']!r}: both noul criteria need a text")
        means = f"\nYes means: {_text(criteria['true'])}\nNo means: {_text(criteria['false'])}"
        record = {**record, "question": record["question"] + means}
    return {**record, "options": ["No", "Yes"], "answer_keys": ["false", "true"]}


def _answer(record: dict, row: list[float]) -> dict:
    if record["kind"] == "noul":
        return {"type": "noul", "noul": row[1]}
    probabilities = dict(zip(record["answer_keys"], row, strict=True))
    if record["kind"] == "choice":
        return {
            "type": "choice",
            "choice": max(probabilities, key=probabilities.__getitem__),
            "probabilities": probabilities,
            "confidence": choice_confidence(row),
        }
    return {
        "type": "score",
        "score": math.fsum(index * p for index, p in enumerate(row)),
        "probabilities": probabilities,
        "confidence": score_confidence(row),
        "legend": record["legend"],
    }


def _check_distribution(record: dict, row: list[float]) -> None:
    if len(row) != len(record["answer_keys"]):
        counts = f"{len(row)} probabilities for {len(record['answer_keys'])} answers"
        raise ValueError(f"question {record['id']!r}: {counts}")
    if not all(math.isfinite(p) and 0 <= p <= 1 for p in row) or abs(math.fsum(row) - 1) > 1e-6:
        raise ValueError(f"question {record['id']!r}: probabilities must be in [0, 1] and sum to 1")


def _text(value: Any) -> str:
    """A string as it is, anything else as JSON with sorted keys."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
