"""Stand-in for Open-Jev (see `jev/__init__.py`): a loaded model behind `Predictor.predict(request)`."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .api import compile_request, format_response
from .metrics import softmax

ALIASES = (None, "open-jev", "jev-latest")
BASE_MAX_LENGTH = 4096


class TorchScorer:
    """Scores records with a `DecisionModel`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def score(self, records: list[dict]) -> tuple[list[list[float]], int]:
        """One row of logits per record, and the number of tokens read."""
        import torch

        with torch.inference_mode():
            rows = [row.tolist() for row in self.model(records)]
        return rows, self.model.last_input_tokens

    def score_request(self, records: list[dict], *, batch_size: int) -> tuple[list[list[float]], dict]:
        """As `score`, for a model that shares prefixes; the statistics hold `logical_input_tokens`."""
        import torch

        with torch.inference_mode():
            return self.model.score_cached(records, batch_size=batch_size)


class Predictor:
    """Validates a request, scores its candidates, and formats the typed answers."""

    def __init__(
        self,
        scorer: Any,
        *,
        model_name: str,
        temperature: float,
        batch_size: int,
        max_questions: int = 4096,
        max_candidates: int = 65536,
        method: str,
        provenance: dict,
        prefix_cache: bool,
    ) -> None:
        if batch_size < 1:
            raise ValueError("batch_size must be at least 1")
        self.scorer = scorer
        self.model_name = model_name
        self.temperature = temperature
        self.batch_size = batch_size
        self.max_questions = max_questions
        self.max_candidates = max_candidates
        self.method = method
        self.provenance = provenance
        self.prefix_cache = prefix_cache

    def predict(self, request: dict) -> dict:
        """The response to one request. ValueError for a bad request, RuntimeError for unusable logits."""
        if not isinstance(request, dict):
            raise ValueError("the request must be an object")
        for field in ("state", "questions"):
            if field not in request:
                raise ValueError(f"{field} is required")
        if request.get("model") not in (*ALIASES, self.model_name):
            raise ValueError(f"unknown model {request['model']!r}; this server has {self.model_name!r}")
        if isinstance(request["questions"], dict) and len(request["questions"]) > self.max_questions:
            raise ValueError(f"at most {self.max_questions} questions a request")
        records = compile_request(request["state"], request["questions"])
        candidates = sum(_candidates(record) for record in records)
        if candidates > self.max_candidates:
            raise ValueError(f"at most {self.max_candidates} candidates a request")

        start = time.perf_counter()
        rows, tokens, cache = self._score(records)
        seconds = time.perf_counter() - start
        for record, row in zip(records, rows, strict=True):
            if len(row) != len(record["answer_keys"]) or not all(math.isfinite(logit) for logit in row):
                raise RuntimeError("backend returned invalid logits")
        answers = format_response(records, [softmax(row, self.temperature) for row in rows])
        return {
            "model": self.model_name,
            **answers,
            "usage": {"input_tokens": tokens, "output_tokens": 0},
            "metadata": {
                "method": self.method,
                "temperature": self.temperature,
                "candidate_sequences": candidates,
                "inference_seconds": seconds,
                "prefix_cache": cache,
                **self.provenance,
            },
        }

    def _score(self, records: list[dict]) -> tuple[list[list[float]], int, dict]:
        if self.prefix_cache:
            rows, stats = self.scorer.score_request(records, batch_size=self.batch_size)
            if len(rows) != len(records):
                raise RuntimeError("backend returned invalid logits")
            return rows, stats["logical_input_tokens"], stats
        rows: list[list[float]] = [[] for _ in records]
        tokens = 0
        for group in candidate_batches(records, self.batch_size):
            scored, count = self.scorer.score([record for _, record in group])
            if len(scored) != len(group):
                raise RuntimeError("backend returned invalid logits")
            tokens += count
            for (index, _), row in zip(group, scored, strict=True):
                rows[index].extend(row)
        return rows, tokens, {"enabled": False}


def candidate_batches(records: list[dict], limit: int) -> Iterator[list[tuple[int, dict]]]:
    """Groups of (record index, partial record) with at most `limit` candidates; large records are split."""
    group: list[tuple[int, dict]] = []
    room = limit
    for index, record in enumerate(records):
        start, total = 0, _candidates(record)
        while start < total:
            if room == 0:
                yield group
                group, room = [], limit
            stop = min(total, start + room)
            group.append((index, _part(record, start, stop)))
            room -= stop - start
            start = stop
    if group:
        yield group


def load_predictor(
    *,
    checkpoint: str | None = None,
    model_id: str | None = None,
    revision: str | None = None,
    device: str,
    max_length: int | None = None,
    batch_size: int = 32,
    prefix_cache: bool = False,
) -> Predictor:
    """A predictor for a checkpoint package, or for a base model without one.

    ValueError unless exactly one of `checkpoint` and `model_id` is given, and `revision` with the latter.
    """
    from .model import DecisionModel

    if (checkpoint is None) == (model_id is None):
        raise ValueError("give either a checkpoint or a model id")
    digest = None
    if checkpoint is not None:
        path = Path(checkpoint)
        temperature = read_temperature(path)
        method = json.loads((path / "model.json").read_text("utf-8"))["method"]
        digest = checkpoint_sha256(path)
        model = DecisionModel.load(path, device)
        if max_length is not None:
            model.max_length = max_length
    else:
        if revision is None:
            raise ValueError("a model id needs a revision")
        temperature, method = 1.0, "base-model"
        longest = BASE_MAX_LENGTH if max_length is None else max_length
        model = DecisionModel(model_id, revision, device=device, max_length=longest).eval()
    if prefix_cache and not hasattr(model, "score_cached"):
        raise ValueError("prefix_cache is not available: this model has no score_cached")
    provenance = {
        "checkpoint_sha256": digest,
        "base_revision": model.revision,
        "max_length": model.max_length,
        "backbone_parameter_dtypes": sorted({str(each.dtype) for each in model.backbone.parameters()}),
        "code_commit": "standin",
    }
    return Predictor(
        TorchScorer(model),
        model_name=model.model_id,
        temperature=temperature,
        batch_size=batch_size,
        method=method,
        provenance=provenance,
        prefix_cache=prefix_cache,
    )


def read_temperature(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / "temperature.json").read_text("utf-8"))["temperature"])


def checkpoint_sha256(checkpoint: Path) -> str:
    """One digest over the relative name and the content of every file of the package."""
    digest = hashlib.sha256()
    for file in sorted(each for each in checkpoint.rglob("*") if each.is_file()):
        digest.update(file.relative_to(checkpoint).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _candidates(record: dict) -> int:
    return 1 if record["kind"] == "noul" else len(record["options"])


def _part(record: dict, start: int, stop: int) -> dict:
    if record["kind"] == "noul" or (start, stop) == (0, len(record["options"])):
        return record
    return {
        **record,
        "options": record["options"][start:stop],
        "answer_keys": record["answer_keys"][start:stop],
    }
