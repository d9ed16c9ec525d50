"""`openjev-fast warmup`: tune a checkpoint's matmuls and attention ahead, so that a server starts with it all known."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openjev_fast_plugin.console import each, say, step

if TYPE_CHECKING:
    import torch

    from openjev_fast_plugin.ops._choices import Product
    from openjev_fast_plugin.tables import Entry
    from openjev_fast_plugin.tuner import Tuning

# Forwards run on rows in multiples of this on a GPU.
BUCKET = 8
DEFAULT_ROWS = "8-512"
_MOST_ROWS = 1 << 20

# An iterable shown as a progress bar.
Bar = Callable[[list["Product"]], Iterable["Product"]]


class WarmupFailed(RuntimeError):
    """Nothing could be tuned, or not everything; the message says what and why."""


def parse_rows(text: str) -> list[int]:
    """Row counts named by a text such as "72,280" or "8-512" or "512-2048:64": each, or every 8th or 64th of a range.

    Rounded up to multiples of 8, as forwards are; ascending, each once. ValueError for any other text.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?\s*", part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is neither a number of rows nor a range such as 8-512 or 8-512:64"
            )
        first, last, every = (int(number) if number else None for number in match.groups())
        assert first is not None
        last, every = first if last is None else last, BUCKET if every is None else every
        if not 1 <= first <= last <= _MOST_ROWS or every < 1:
            raise ValueError(f"{part.strip()!r} names no rows between 1 and {_MOST_ROWS}")
        found.update(-(-rows // BUCKET) * BUCKET for rows in range(first, last + 1, every))
    return sorted(found)


def run(checkpoint: Path, device: str | None, rows: list[int], again: bool, bar: Bar) -> dict[str, Any]:
    """Load a checkpoint and tune its attention, and its matmuls for forwards of these numbers of rows.

    checkpoint: a checkpoint package. device: a torch device, or None for the first GPU where there is one and the CPU
    elsewhere. again: measure what is known already too. bar: shows the progress over a list.

    Returns {device, nothing: reason} where the products of this model on this device leave nothing to choose, else
    {device, **what `tune` returns}. Raises BackendError where the fast backend cannot take the model.
    """
    if not (checkpoint / "model.json").is_file():
        raise WarmupFailed(f"{checkpoint} is no checkpoint package: it has no model.json")
    if find_spec("jev") is None:
        raise WarmupFailed("Open-Jev (module jev) is not installed here")
    import torch

    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type != "cuda":
        return {
            "device": device,
            "nothing": f"on {device} every matmul is PyTorch's own; tuning chooses between ways to compute it on an "
            "NVIDIA GPU",
        }
    from jev.model import DecisionModel

    from openjev_fast_plugin import backend_flag
    from openjev_fast_plugin.settings import Settings
    from openjev_fast_plugin.takeover import accelerate

    with step(f"loading {checkpoint}"), backend_flag.decided(None):
        # Whatever environment and checkpoint say, the backend is chosen here.
        model = accelerate(DecisionModel.load(checkpoint, device), "fast", Settings(tuning="tables"))
    engine = model.openjev_fast.engine
    if engine.tuning is None:
        dtype = engine.describe()["dtype"]
        return {"device": device, "nothing": f"the weights are {dtype}; tuning is for bfloat16"}
    with torch.cuda.device(torch.device(device)):
        return {"device": device, **tune(engine.tuning, rows, again, bar)}


def tune(tuning: Tuning, rows: list[int], again: bool, bar: Bar) -> dict[str, Any]:
    """Tune attention and every product of forwards with these numbers of rows, and keep each as it is found.

    Returns {gpu, driver, cublas, file, seconds, tuned, known, failed, attention, forwards, products}. products: figures
    of each, those known before too, with `way` for people. failed: products that could not be tuned, and attention,
    with the reason. attention: its heads, few_queries, default and samples as `tables.TileEntry` has them, whether they
    were known, and their file; null where no kernel takes the heads, or it failed. forwards: for each number of rows
    the milliseconds of a forward's matmuls and of what reads them, by default and as chosen.
    """
    asked = tuning.products(rows)
    missing = [product for product in asked if again or product not in tuning.entries]
    start = time.monotonic()
    attention_known = tuning.attention is not None and not tuning.attention.wanted
    attention_failed = _tune_attention(tuning, again)
    failed = tune_products(tuning, missing, bar)
    done = {product: tuning.entries[product] for product in asked if product in tuning.entries}
    return {
        "gpu": tuning.store.facts.device,
        "driver": tuning.store.facts.driver,
        "cublas": tuning.store.facts.cublas,
        "file": str(tuning.store.path),
        "seconds": round(time.monotonic() - start, 1),
        "tuned": len(missing) - len(failed),
        "known": len(asked) - len(missing),
        "failed": attention_failed + failed,
        "attention": _attention(tuning, attention_known and not again),
        "forwards": [_forward(tuning, count, done) for count in rows],
        "products": [
            {**product._asdict(), **asdict(entry), "way": str(entry.choice)}
            for product, entry in done.items()
        ],
    }


def tune_products(tuning: Tuning, products: list[Product], bar: Bar) -> list[dict[str, Any]]:
    """Tune these, and keep each as it is found; returns those that could not be tuned, with the reason.

    The device is current, and nothing else runs on it. Raises OSError where a choice cannot be kept.
    """
    import torch

    failed = []
    with torch.inference_mode():
        for product in bar(products):
            try:
                for _ in tuning.tune(product):
                    pass
            except OSError:
                # The table cannot be kept: there is no use in going on.
                raise
            except RuntimeError as error:
                failed.append({**product._asdict(), "reason": next(iter(str(error).splitlines()), "")})
    return failed


def tune_attention(tuning: Tuning, device: torch.device) -> dict[str, int]:
    """Measure the tile sizes of attention where they are not known; returns {attention: 1 where that was done, else 0}.

    Raises OSError where they cannot be kept. What cannot be measured is said, and stays as it is.
    """
    import torch

    wanted = tuning.attention is not None and tuning.attention.wanted
    with torch.cuda.device(device):
        failed = _tune_attention(tuning, again=False)
    for failure in failed:
        say(
            f"openjev-fast: the tile sizes of attention stay as they are, they could not be measured: {failure}"
        )
    return {"attention": int(wanted and not failed)}


def _tune_attention(tuning: Tuning, again: bool) -> list[dict[str, Any]]:
    """Measure the tile sizes, unless they are known or no kernel takes the heads; returns the failure, if any.

    The device is current, and nothing else runs on it. Raises OSError where they cannot be kept.
    """
    import torch

    attention = tuning.attention
    if attention is None or not (again or attention.wanted):
        return []
    with torch.inference_mode(), step("measuring tile sizes of attention"):
        try:
            for _ in attention.tune():
                pass
        except OSError:
            # As with matmuls, there is no use in going on.
            raise
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), "")
            return [{"op": "tree_attention", **attention.heads._asdict(), "reason": reason}]
    return []


def _attention(tuning: Tuning, known: bool) -> dict[str, Any] | None:
    """What is known of attention; None where nothing is."""
    from openjev_fast_plugin.tables import tiles_content

    attention = tuning.attention
    entry = None if attention is None else attention.entries.get(attention.heads)
    if attention is None or entry is None:
        return None
    return {**tiles_content(attention.heads, entry), "known": known, "file": str(attention.store.path)}


def tune_wanted(tuning: Tuning, device: torch.device) -> dict[str, int]:
    """Tune what forwards of the model have asked for and had no choice; returns {tuned, failed}.

    As idle tuning does, forwards of more than `tuner.MOST_ROWS` rows are left out. Raises as `tune_products`.
    """
    import torch

    from openjev_fast_plugin.tuner import MOST_ROWS, Weight

    wanted = [
        product
        for product in tuning.choices.wanted
        if product.rows <= MOST_ROWS
        and Weight(product.op, product.features, product.columns) in tuning.tuner.weights
    ]
    with torch.cuda.device(device):
        failed = tune_products(tuning, wanted, partial(each, message="tuning matmuls", unit="product"))
    for failure in failed:
        say(f"openjev-fast: a matmul stays as it is, it could not be tuned: {failure}")
    return {"tuned": len(wanted) - len(failed), "failed": len(failed)}


def _forward(tuning: Tuning, rows: int, done: dict[Product, Entry]) -> dict[str, Any]:
    """Milliseconds of a forward's matmuls; null where one of them could not be tuned."""
    entries = [
        (done.get(product), count)
        for weight, count in tuning.counts.items()
        for product in tuning.products([rows])
        if (product.op, product.features, product.columns) == weight
    ]
    default = chosen = 0.0
    for entry, count in entries:
        if entry is None:
            return {"rows": rows, "default_ms": None, "tuned_ms": None}
        default += count * entry.default_us / 1e3
        chosen += count * entry.us / 1e3
    return {"rows": rows, "default_ms": round(default, 3), "tuned_ms": round(chosen, 3)}


def render(result: dict[str, Any]) -> str:
    """The result of `run` for a person to read."""
    if "nothing" in result:
        return f"nothing to tune: {result['nothing']}"
    lines = [
        f"matmuls of a forward on {result['gpu']}, driver {result['driver']}, cuBLAS {result['cublas']}, with the ops "
        "that read them:",
        f"{'rows':>6} {'default ms':>11} {'tuned ms':>9} {'saved':>6}",
    ]
    for forward in result["forwards"]:
        default, tuned = forward["default_ms"], forward["tuned_ms"]
        if default is None:
            lines.append(f"{forward['rows']:>6} {'failed':>11}")
        else:
            lines.append(f"{forward['rows']:>6} {default:>11.2f} {tuned:>9.2f} {1 - tuned / default:>6.1%}")
    lines += [f"failed: {failure}" for failure in result["failed"]]
    attention = result["attention"]
    if attention is not None:
        lines.append(
            f"attention: small tiles up to {attention['few_queries']} rows, {attention['default']} where nothing is "
            f"measured{'; known before' if attention['known'] else ''}; kept in {attention['file']}"
        )
    lines.append(
        f"{result['tuned']} products tuned in {result['seconds']:.0f} s, {result['known']} known before; kept in "
        f"{result['file']}, for servers that start from now on"
    )
    return "\n".join(lines)
