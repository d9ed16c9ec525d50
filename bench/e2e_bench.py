"""Original and fast forward side by side, records to logits, in one process.

    python bench/e2e_bench.py                        # the small profile on the CPU, both cases: about 15 minutes
    python bench/e2e_bench.py --case example --repeats 30

Both models are loaded from the same checkpoint; each round times one call of each mode, so a slow spell of the
machine meets both. Prints a table and writes results/<device>/e2e.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import choice, example
from harness import interleaved, summary, write
from jev.api import candidate_prompts, compile_request
from jev.model import DecisionModel

from openjev_fast_plugin import Settings
from openjev_fast_plugin.checkpoint import PROFILES, make_checkpoint
from openjev_fast_plugin.console import say, step
from openjev_fast_plugin.prompts import PromptEncoder
from openjev_fast_plugin.takeover import accelerate

CASES = ("example", "choice_32x512")


def prompt_lengths(request: dict[str, Any], model: DecisionModel) -> list[int]:
    """Tokens of every prompt of a request, by the model's own tokenizer."""
    records = compile_request(request["state"], request["questions"])
    groups = PromptEncoder(model.tokenizer, candidate_prompts).encode(records)
    return [len(sequence) for group in groups for sequence in group]


def request_for(case: str, model: DecisionModel) -> dict[str, Any]:
    """The request of a case, sized with the model's own tokenizer."""
    if case == "example":
        return example()
    options, tokens = (int(number) for number in case.removeprefix("choice_").split("x"))
    return choice(options, tokens, lambda request: max(prompt_lengths(request, model)))


def bench_case(
    case: str, models: dict[str, DecisionModel], profile: str, repeats: int, warmups: int
) -> list[dict[str, Any]]:
    """Rows of one case, one per mode."""
    request = request_for(case, models["torch"])
    records = compile_request(request["state"], request["questions"])

    def run(model: DecisionModel) -> list[torch.Tensor]:
        with torch.inference_mode():
            return model(records)

    rows_asked, probabilities = {}, {}
    for mode, model in models.items():
        probabilities[mode] = torch.cat([row.float().softmax(0) for row in run(model)])
        rows_asked[mode] = model.last_input_tokens
    assert len(set(rows_asked.values())) == 1, rows_asked
    difference = (probabilities["torch"] - probabilities["fast"]).abs().max().item()
    with step(f"{case}: {warmups} warm-up and {repeats} timed rounds"):
        times = interleaved(
            {mode: (lambda model=model: run(model)) for mode, model in models.items()},
            repeats=repeats,
            warmups=warmups,
            progress=say,
        )
    lengths = prompt_lengths(request, models["torch"])
    # The original computes every prompt padded to the longest.
    computed = {"torch": len(lengths) * max(lengths), "fast": models["fast"].last_stats["rows_computed"]}
    return [
        {
            "profile": profile,
            "case": case,
            "mode": mode,
            "scope": "e2e",
            **summary(times[mode]),
            "rows_asked": rows_asked[mode],
            "rows_computed": computed[mode],
            **dict.fromkeys(("kernels", "busy_ms", "floor_ms", "peak_gib")),
            "largest_probability_difference": 0.0 if mode == "torch" else round(difference, 6),
            "samples": repeats,
        }
        for mode in models
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """A table with the ratio to the original beside each fast row."""
    lines = [
        f"{'case':<16}{'mode':<8}{'p50 ms':>10}{'min ms':>10}{'max ms':>10}{'rows':>8}{'ratio':>8}{'dp':>10}"
    ]
    original = {row["case"]: row["p50_ms"] for row in rows if row["mode"] == "torch"}
    for row in rows:
        lines.append(
            f"{row['case']:<16}{row['mode']:<8}{row['p50_ms']:>10.1f}{row['min_ms']:>10.1f}{row['max_ms']:>10.1f}"
            f"{row['rows_computed']:>8}{original[row['case']] / row['p50_ms']:>8.2f}"
            f"{row['largest_probability_difference']:>10.5f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="small", help="model shapes (default: small)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="checkpoint package of that profile (default: one is made)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--case", choices=CASES, action="append", help="repeat for several (default: all)")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--warmups", type=int, default=2, help="untimed rounds first (default: 2)")
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint
        if checkpoint is None:
            with step(f"making a {args.profile} checkpoint"):
                checkpoint = make_checkpoint(args.profile, Path(folder) / args.profile)
        with step("loading the model twice"):
            models = {mode: DecisionModel.load(checkpoint, args.device) for mode in ("torch", "fast")}
            accelerate(models["fast"], "fast", Settings())
    rows: list[dict[str, Any]] = []
    for case in args.case or CASES:
        rows += bench_case(case, models, args.profile, args.repeats, args.warmups)
    print(render(rows))
    say(f"wrote {write(device, 'e2e', rows)}")


if __name__ == "__main__":
    sys.exit(main())
