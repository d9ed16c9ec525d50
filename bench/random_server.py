"""`python -m jev.server` with random weights of a released shape, built on the device instead of read from a disk.

    python bench/random_server.py --profile 27b --backend fast --device cuda:0 --port 8791

Takes the server's own flags but --checkpoint and --model, and --delta-rule {fla,torch} for the original. Nothing of
the server is replaced but `AutoModelForImageTextToText.from_pretrained`, which hands out the model; the tokenizer is
the one of `openjev-fast make-checkpoint`. A 27B checkpoint would be 50 GB; this takes as long as drawing them on the
device.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from openjev_fast_plugin import bootstrap
from openjev_fast_plugin.checkpoint import PROFILES, train_tokenizer
from openjev_fast_plugin.measurement.originals import use_delta_rule
from openjev_fast_plugin.random_models import image_text_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", choices=sorted(PROFILES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--delta-rule",
        choices=("fla", "torch"),
        help="what the original computes linear attention with: flash-linear-attention or PyTorch",
    )
    args, rest = parser.parse_known_args()

    def from_pretrained(model_id: str, *, device_map: dict[str, str], **options: Any) -> Any:
        vocabulary = PROFILES[args.profile].vocab
        device = torch.device(device_map[""])
        model = image_text_model(args.profile, device, args.seed, vocabulary=vocabulary)
        if args.delta_rule is not None:
            use_delta_rule(model.model.language_model, args.delta_rule)
        return model

    AutoModelForImageTextToText.from_pretrained = from_pretrained
    bootstrap.install()
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(PROFILES[args.profile].vocab).save_pretrained(folder)
        revision = f"random-{args.profile}-seed-{args.seed}"
        sys.argv = ["jev.server", "--model", folder, "--revision", revision, *rest]
        runpy.run_module("jev.server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
