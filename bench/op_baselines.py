"""What others offer for the ops over a tree: FLA's chunked gated delta rule and PyTorch's fused attention.

Neither knows trees. Padded, each candidate is a sequence of its own, as the original has it; FLA can also run a
tree level by level, since it takes and leaves states; attention can take packed rows with a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from op_inputs import path_rows
from op_registry import Prepared, Way, copies
from torch.nn.attention import SDPBackend, sdpa_kernel

from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.ops import gate_mul

# The math backend is no kernel, and flash takes no mask.
CAUSAL_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MASKED_BACKENDS = {name: CAUSAL_BACKENDS[name] for name in ("efficient", "cudnn")}

Compare = Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]


@dataclass(frozen=True)
class Rectangle:
    """Packed rows laid out as sequences of one length. row: [B, L] int64, the number of packed rows where none is.

    place: [N] int64, where in the flattened rectangle each packed row is, -1 for rows it does not hold.
    """

    row: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], rows: int, device: torch.device) -> Rectangle:
        """sequences: the packed rows of each. rows: N."""
        table = np.full((len(sequences), max(map(len, sequences))), rows, dtype=np.int64)
        for index, sequence in enumerate(sequences):
            table[index, : len(sequence)] = sequence
        place = np.full(rows + 1, -1, dtype=np.int64)
        # A row that several sequences share is read from the first.
        place[table.ravel()[::-1]] = np.arange(table.size)[::-1]
        return cls(torch.from_numpy(table).to(device), torch.from_numpy(place[:rows]).to(device))

    def lay_out(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] to [B, L, ...], zeros where no row is; x may have more rows than N."""
        return torch.cat([x[: len(self.place)], x.new_zeros(1, *x.shape[1:])])[self.row]


def candidate_rows(forest: Forest) -> list[np.ndarray]:
    """The packed rows of each input sequence, from its first token to its last."""
    tables = forest.node_start, forest.node_length, forest.node_parent
    found = []
    for read in forest.read_row[forest.candidate_read].tolist():
        path = path_rows(*tables, int(forest.node[read]))
        found.append(path[path <= read])
    return found


@dataclass(frozen=True)
class Level:
    """Nodes of one depth. parent: [nodes] int64, the place of each node's parent in the level above, None for roots."""

    rectangle: Rectangle
    lengths: list[int]
    parent: torch.Tensor | None
    has_children: bool


def levels(forest: Forest, device: torch.device) -> list[Level]:
    """The forest's nodes by depth."""
    found, rows, last = [], len(forest.token), int(forest.node_level.max())
    above = np.empty(0)
    for depth in range(last + 1):
        nodes = np.flatnonzero(forest.node_level == depth)
        starts, lengths = forest.node_start[nodes], forest.node_length[nodes]
        sequences = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
        parent = None
        if depth:
            parent = torch.from_numpy(np.searchsorted(above, forest.node_parent[nodes])).to(device)
        rectangle = Rectangle.of(sequences, rows, device)
        found.append(Level(rectangle, lengths.tolist(), parent, depth < last))
        above = nodes
    return found


def _chunked(*arguments: torch.Tensor, **options):
    # Imported where it runs: nothing else here needs Triton.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = arguments
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, **options)


def _as_upstream(rectangle: Rectangle, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """q, k, v, g, beta laid out, q and k repeated for every value head, beta in the model's dtype."""
    q, k, v, g, beta = (rectangle.lay_out(x) for x in given)
    groups = v.shape[2] // q.shape[2]
    return [*(x.repeat_interleave(groups, dim=2) for x in (q, k)), v, g, beta.to(q.dtype)]


def fla_padded(
    forest: Forest, given: Sequence[torch.Tensor], exact: Callable[[], torch.Tensor], cache_bytes: int
) -> list[Way]:
    """Every candidate a sequence, padded to the longest with inert rows (k = beta = g = 0)."""
    device = given[0].device

    def prepare() -> Prepared:
        rectangle = Rectangle.of(candidate_rows(forest), len(forest.token), device)
        sets = copies(_as_upstream(rectangle, given), cache_bytes)

        def compare(output) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(output[0].flatten(0, 1)[rectangle.place], exact())]

        return Prepared([partial(_chunked, *inputs) for inputs in sets], compare, rectangle.row.numel())

    return [Way("sequences of one length", prepare)]


def fla_levels(
    forest: Forest, given: Sequence[torch.Tensor], exact: Callable[[], torch.Tensor], cache_bytes: int
) -> list[Way]:
    """Level by level, final states handed to the children; a level as `cu_seqlens`, or as a rectangle.

    Rows are laid out before, untimed; the gather of the parents' states is part of the work. Lengths are given on the
    host too, since FLA would otherwise ask the device for them, which a graph cannot hold; it keeps the chunk tables it
    derives from the same tensors, so that only a first call copies them.
    """
    device = given[0].device
    found = levels(forest, device)

    def prepare(ragged: bool) -> Prepared:
        inputs, bounds = [], []
        for level in found:
            tensors, bound = _as_upstream(level.rectangle, given), None
            if ragged:
                real = level.rectangle.row < len(forest.token)
                tensors = [x[real][None] for x in tensors]
                host = F.pad(torch.tensor(level.lengths).cumsum(0), (1, 0))
                bound = host.to(device), host
            inputs.append(tensors)
            bounds.append(bound)

        def run(by_level: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            outputs, states = [], None
            for level, tensors, bound in zip(found, by_level, bounds, strict=True):
                options = {} if bound is None else {"cu_seqlens": bound[0], "cu_seqlens_cpu": bound[1]}
                if level.parent is not None:
                    options["initial_state"] = states.index_select(0, level.parent)
                output, states = _chunked(*tensors, output_final_state=level.has_children, **options)
                outputs.append(output)
            return outputs

        def compare(outputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            expected = exact()
            found_rows = torch.empty_like(expected)
            for level, output in zip(found, outputs, strict=True):
                rows = level.rectangle.row
                real = rows < len(forest.token)
                found_rows[rows[real]] = (output[0] if ragged else output[real]).to(expected.dtype)
            return [(found_rows, expected)]

        rows = sum(level.rectangle.row.numel() for level in found)
        return Prepared(
            [partial(run, one) for one in copies(inputs, cache_bytes)],
            compare,
            len(forest.token) if ragged else rows,
        )

    rectangles = Way("rectangles", partial(prepare, False))
    if len(found) == 1 and len(found[0].lengths) == 1:
        # A single sequence is its own rectangle.
        return [rectangles]
    return [Way("cu_seqlens", partial(prepare, True)), rectangles]


def dense_mask(forest: Forest, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[1, 1, rows, rows], 0 where a row sees a row of its path, -inf elsewhere; padding rows see themselves."""
    seen = np.eye(rows, dtype=bool)
    for row, before in enumerate(forest.predecessor[:, 0].tolist()):
        if before >= 0:
            seen[row] |= seen[before]
    mask = torch.zeros(rows, rows, dtype=dtype, device=device)
    return mask.masked_fill_(torch.from_numpy(~seen).to(device), -torch.inf)[None, None]


def sdpa(
    inputs: Callable[[], Sequence[torch.Tensor]],
    scale: float,
    compare: Compare,
    cache_bytes: int,
    mask: Callable[[], torch.Tensor] | None = None,
) -> list[Way]:
    """PyTorch's fused attention, then the gate: every backend, layout in memory and form of the key heads.

    inputs: makes q [B, L, HQ, D], k, v [B, L, HKV, D] and gate [B L, HQ, D].
    compare: of the gated output [B L, HQ * D].
    mask: makes an additive mask; causal where not given. (PyTorch turns a boolean one into that in every call.)
    """

    def prepare(backend: SDPBackend, heads_first: bool, expanded: bool) -> Prepared:
        q, *keys, gate = inputs()
        rows = q.shape[0] * q.shape[1]
        if expanded:
            keys = [x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in keys]
        given = [x.transpose(1, 2) for x in (q, *keys)]
        given = [x.contiguous() if heads_first else x for x in given]
        bias = None if mask is None else mask()

        def run(q, k, v, gate) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=not expanded
                )
            return gate_mul(out.transpose(1, 2).flatten(0, 1), gate)

        sets = copies([*given, gate], cache_bytes)
        return Prepared([partial(run, *one) for one in sets], compare, rows)

    backends = CAUSAL_BACKENDS if mask is None else MASKED_BACKENDS
    layouts = {"rows first": False, "heads first": True}
    forms = {"grouped": False, "expanded": True}
    return [
        Way(f"{name}, {layout}, {form}", partial(prepare, backend, layouts[layout], forms[form]))
        for (name, backend), layout, form in product(backends.items(), layouts, forms)
    ]
