"""What every benchmark shares: its results row, and the results file with the record of where it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from openjev_fast_plugin.measurement import record

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"


def row(**values: Any) -> dict[str, Any]:
    """A results row; figures that a device or mode does not have are null."""
    return {**dict.fromkeys(("kernels", "busy_ms", "floor_ms", "peak_gib")), **values}


def source_digest() -> str:
    """Of everything a number depends on: the package, its kernels and patches, and the benchmarks."""
    return record.source_digest({**record.source_folders(), "bench": BENCH})


def write(device: torch.device, bench: str, rows: list[dict[str, Any]], path: Path | None = None) -> Path:
    """Write all rows of this run to `path`, by default `results/<device>/<bench>.json`; an earlier file is replaced."""
    path = path or RESULTS / record.device_slug(device) / f"{bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0])
    command = f"python bench/{script.name}" if script.resolve().parent == BENCH else f"python {script}"
    folders = {**record.source_folders(), "bench": BENCH}
    content = {"meta": record.meta(device, command, folders), "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
