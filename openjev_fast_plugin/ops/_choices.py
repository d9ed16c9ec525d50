"""How products with a weight, and attention, are computed on a device: looked up by the ops, filled in by the tuner.

Without choices for a device everything has its default way. Standard library only.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

OPS = ("linear", "linear_silu_mul", "linear_update")
Way = Literal["pytorch", "kernel", "cublaslt"]
# Products noted as wanted, at most: a server that makes no choices forgets none.
_MOST_WANTED = 4096


class Product(NamedTuple):
    """One op of `ops.linear` on x [rows, columns] and a weight [features, columns], bfloat16."""

    op: str
    rows: int
    features: int
    columns: int


class Heads(NamedTuple):
    """What attention's tile size depends on beside the device: HQ, HKV and D of `ops.tree_attention`."""

    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Choice:
    """One way to compute a product.

    way: "pytorch" is `F.linear`, "kernel" csrc/linear_sm90.cuh, "cublaslt" one algorithm of cuBLASLt.
    band: of "pytorch", rows of the weight that one call computes with, the last call with what is left; 0: all of them.
        With an algorithm of cuBLASLt, that computes what is left.
    tile, parts: of the kernel. fused: the kernel computes the MLP's activation as well.
    form, partials, workspace, algorithm: of csrc/cublaslt_binding.cpp. partials: parts of the columns whose float32
        sums are left to the op that reads the product; 1: there are none, the product is bfloat16.
    """

    way: Way
    band: int = 0
    tile: int = 0
    parts: int = 1
    fused: bool = False
    form: int = 0
    partials: int = 1
    workspace: int = 0
    algorithm: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.way == "kernel":
            parts = f" in {self.parts} parts" if self.parts > 1 else ""
            return f"kernel, tiles of {self.tile}{parts}{', activation fused' if self.fused else ''}"
        if self.way == "cublaslt":
            sums = f", {self.partials} partial sums" if self.partials > 1 else ""
            return f"{self._algorithm_name()}{sums}"
        rest = f", the rest by {self._algorithm_name()}" if self.algorithm else ""
        return f"F.linear, {self.band} weight rows at a time{rest}" if self.band else "F.linear"

    def _algorithm_name(self) -> str:
        name = zlib.crc32(repr(self.algorithm).encode())
        return f"cuBLASLt {name:08x}, {('weight', 'rows')[self.form]} first"

    def encoded(self) -> list[int]:
        """The numbers that csrc/product.cpp reads: every field, the algorithm's integers behind how many they are."""
        numbers = [get_args(Way).index(self.way), self.band, self.tile, self.parts, int(self.fused)]
        return [*numbers, self.form, self.partials, self.workspace, len(self.algorithm), *self.algorithm]


PYTORCH = Choice("pytorch")


class Choices:
    """The choices of one device. Any thread may look up; choices are made while no forward runs on the device.

    wanted: products that were asked for and have no choice, in the order of the first time; the first few thousand.
    few_queries: the most queries of attention that are planned in small tiles, for heads it was measured for.
    """

    def __init__(self, chosen: Mapping[Product, Choice] | None = None):
        self._chosen = dict(chosen or {})
        self._changes: Counter[int] = Counter()
        self.wanted: dict[Product, None] = {}
        self.few_queries: dict[Heads, int] = {}

    def __len__(self) -> int:
        return len(self._chosen)

    def __contains__(self, product: Product) -> bool:
        return product in self._chosen

    def find(self, product: Product) -> Choice | None:
        """The choice for a product; one without is noted as wanted."""
        found = self._chosen.get(product)
        if found is None and product not in self.wanted and len(self.wanted) < _MOST_WANTED:
            self.wanted[product] = None
        return found

    def choose(self, product: Product, choice: Choice, default: Choice) -> None:
        """Compute a product this way from now on. default: how it is computed without a choice."""
        if self._chosen.get(product, default) != choice:
            self._changes[product.rows] += 1
        self._chosen[product] = choice
        self.wanted.pop(product, None)

    def state(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Changes when the way of any product of these numbers of rows does."""
        return tuple(self._changes[count] for count in rows)


_of_device: dict[int, Choices] = {}


def install(device: int, choices: Choices | None) -> None:
    """Make these the choices of a CUDA device, by its index; None: take them away."""
    if choices is None:
        _of_device.pop(device, None)
    else:
        _of_device[device] = choices


def installed(device: int) -> Choices | None:
    """The choices of a CUDA device, by its index."""
    return _of_device.get(device)
