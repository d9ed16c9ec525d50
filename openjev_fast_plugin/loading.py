"""The original model as Open-Jev loads it, for the commands that hold a backend against it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from openjev_fast_plugin import backend_flag
from openjev_fast_plugin.console import UsageError
from openjev_fast_plugin.settings import ORIGINAL, Selection


def usable_device(device: str | None) -> str:
    """The device asked for; for None the first GPU where there is one, and the CPU elsewhere.

    UsageError where Open-Jev is not installed, or PyTorch does not see the device.
    """
    if find_spec("jev") is None:
        raise UsageError("Open-Jev (module jev) is not installed here")
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device}: PyTorch sees {torch.cuda.device_count() or 'no'} CUDA device here"
        )
    return device


def load_original(checkpoint: Path, device: str) -> Any:
    """The checkpoint's `DecisionModel`, whatever backend the environment or the file ask for.

    UsageError where it cannot be loaded.
    """
    from jev.model import DecisionModel

    try:
        with backend_flag.decided(Selection(ORIGINAL, "argument")):
            return DecisionModel.load(checkpoint, device)
    except (OSError, ValueError) as error:
        raise UsageError(f"{checkpoint} cannot be loaded: {error}") from error
