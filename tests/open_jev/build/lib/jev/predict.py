"""Stand-in for Open-Jev (see `jev/__init__.py`): answer one request file without a server."""

import argparse
import json
from pathlib import Path

import torch

from .api import compile_request, format_response
from .metrics import softmax
from .model import DecisionModel
from .server import strict_json
from .serving import candidate_batches, read_temperature


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer one request file (stand-in for Open-Jev)")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="the answer's file; standard output without it")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()

    request = strict_json(args.request.read_bytes())
    records = compile_request(request["state"], request["questions"])
    model = DecisionModel.load(args.checkpoint, args.device)
    temperature = read_temperature(args.checkpoint)
    with torch.inference_mode():
        rows, tokens = score(model, records, args.batch_size, args.prefix_cache)
    response = {
        "model": model.model_id,
        **format_response(records, [softmax(row, temperature) for row in rows]),
        "usage": {"input_tokens": tokens, "output_tokens": 0},
    }
    text = json.dumps(response, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text, "utf-8")


def score(
    model: DecisionModel, records: list[dict], batch_size: int, prefix_cache: bool
) -> tuple[list[list[float]], int]:
    """One row of logits per record, and the number of tokens read."""
    if prefix_cache:
        if not hasattr(model, "score_cached"):
            raise ValueError("prefix_cache is not available: this model has no score_cached")
        rows, stats = model.score_cached(records, batch_size=batch_size)
        return rows, stats["logical_input_tokens"]
    rows = [[] for _ in records]
    tokens = 0
    for group in candidate_batches(records, batch_size):
        scored = model([record for _, record in group])
        tokens += model.last_input_tokens
        for (index, _), row in zip(group, scored, strict=True):
            rows[index].extend(row.tolist())
    return rows, tokens


if __name__ == "__main__":
    main()
