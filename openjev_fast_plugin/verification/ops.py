"""Every op of a packed forward against its reference, on the inputs the forward gave it.

The tolerances are those of the ops' tests. In bfloat16 at least 98 % of an output's elements equal the reference's
bit for bit, and none is further off than the roundings that chain in it allow. Where sums are long enough that this
says little, the measure is the error against float64, which may be at most 1.05 times that of what the op stands for:
PyTorch's own attention, and a product rounded once. In float32 an element may be off by 1e-4 of itself and 1e-5 of
the output's largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from openjev_fast_plugin import ops
from openjev_fast_plugin.comparison import bfloat16_ulp, relative_l2
from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.ops.delta_rule import KERNEL_CHUNK

EQUAL_SHARE = 0.98
ERROR_RATIO = 1.05
FLOAT32_RTOL, FLOAT32_ATOL = 1e-4, 1e-5
# The kernel of the delta rule and its reference round alike; sums in another order move some roundings, and the state
# carries them along, further over thousands of rows.
DELTA_RULE, DELTA_RULE_FAR, _FAR_ROWS = 2e-3, 2.5e-3, 2000
LARGEST_SHARE = 0.04

# Rows of a product, nodes of an attention and queries of a node that are held against float64.
_PRODUCT_ROWS, _NODES, _QUERIES = 64, 8, 128
# Rows of a weight in float64 at a time.
_BLOCK = 4096


@dataclass(frozen=True)
class Measure:
    """One figure of one output of one call. what: the figure's name; it may be at most `bound`, or at least."""

    output: str
    what: str
    found: float
    bound: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        # What is not a number passes neither.
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    @property
    def share(self) -> float:
        """How much of what is allowed was used, 1 at the bound; for shares of elements, of those that may differ."""
        used, allowed = (1 - self.found, 1 - self.bound) if self.at_least else (self.found, self.bound)
        return used / allowed if allowed else float(used and torch.inf)


@dataclass(frozen=True)
class Call:
    """One call of an op. portable: whether its PyTorch implementation ran."""

    name: str
    arguments: Sequence[Any]
    outputs: tuple[torch.Tensor, ...]
    forest: Forest
    portable: bool


@dataclass
class OpResult:
    """All calls of one op that were checked. worst: the figure nearest to its bound, and its layer and request."""

    calls: int = 0
    worst: tuple[str, Measure] | None = None

    def add(self, place: str, measure: Measure) -> None:
        # Not (a <= b): what is not a number is the worst.
        if self.worst is None or not measure.share <= self.worst[1].share:
            self.worst = place, measure

    def described(self) -> dict[str, Any]:
        """For a report."""
        if self.worst is None:
            return {"calls": self.calls, "worst": None}
        place, measure = self.worst
        return {"calls": self.calls, "worst": {"place": place, **asdict(measure)}}


def measures(call: Call) -> Iterator[Measure]:
    """The figures of one call against its reference; none where what it was given is not finite already."""
    given = [x for x in call.arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not all(torch.isfinite(x).all() for x in given):
        return
    for index, output in enumerate(call.outputs):
        lost = int((~torch.isfinite(output)).sum())
        if lost:
            yield Measure(_OUTPUTS.get(call.name, ("output",))[index], "elements not finite", lost, 0)
            return
    yield from _CHECKS[call.name](call)


# Rounded alike


def _rounded_alike(
    output: str, found: torch.Tensor, expected: torch.Tensor, ulps: int, largest: torch.Tensor | None = None
) -> Iterator[Measure]:
    """largest: magnitude whose ulp counts, the value's own where not given."""
    if found.dtype == torch.float32:
        yield _close(output, found, expected)
        return
    if not found.numel():
        return
    magnitude = torch.maximum(found.abs(), expected.abs()) if largest is None else largest
    distance = (found.float() - expected.float()).abs() / bfloat16_ulp(magnitude)
    yield Measure(output, "ulps off", distance.max().item(), ulps)
    yield _equal_share(output, found, expected)


def _equal_share(output: str, found: torch.Tensor, expected: torch.Tensor) -> Measure:
    different = int((found != expected).sum())
    # One element in a hundred of a small output is less than one element.
    share = 1.0 if different <= 1 else 1 - different / found.numel()
    return Measure(output, "share of elements equal", share, EQUAL_SHARE, at_least=True)


def _close(output: str, found: torch.Tensor, expected: torch.Tensor) -> Measure:
    expected = expected.double()
    largest = expected.abs().max() if expected.numel() else 0.0
    allowed = FLOAT32_RTOL * expected.abs() + FLOAT32_ATOL * largest
    off = (found.double() - expected).abs()
    # Where nothing is allowed, nothing may be off.
    share = torch.where(off > 0, off / allowed, 0.0)
    return Measure(output, "float32 tolerances off", share.max().item() if share.numel() else 0.0, 1.0)


def _add_rms_norm(call: Call) -> Iterator[Measure]:
    (hidden, normed), (expected_hidden, expected_normed) = call.outputs, ops.add_rms_norm_ref(*call.arguments)
    yield Measure("hidden", "elements different", int((hidden != expected_hidden).sum()), 0)
    yield from _rounded_alike("normed", normed, expected_normed, ulps=1)


def _gated_rms_norm(call: Call) -> Iterator[Measure]:
    yield from _rounded_alike("output", call.outputs[0], ops.gated_rms_norm_ref(*call.arguments), ulps=1)


def _silu_mul(call: Call) -> Iterator[Measure]:
    yield from _rounded_alike("output", call.outputs[0], ops.silu_mul_ref(*call.arguments), ulps=2)


def _gate_mul(call: Call) -> Iterator[Measure]:
    yield from _rounded_alike("output", call.outputs[0], ops.gate_mul_ref(*call.arguments), ulps=2)


def _delta_prepare(call: Call) -> Iterator[Measure]:
    pairs = zip(_OUTPUTS["delta_prepare"], call.outputs, ops.delta_prepare_ref(*call.arguments), strict=True)
    for name, found, expected in pairs:
        if name == "g":
            yield _close(name, found, expected)
        elif name == "beta" and call.arguments[0].dtype == torch.bfloat16:
            yield Measure(name, "elements not bfloat16", int((found != found.bfloat16()).sum()), 0)
            yield from _rounded_alike(name, found.bfloat16(), expected.bfloat16(), ulps=1)
        else:
            # q and k are rounded before their norm and after it.
            yield from _rounded_alike(name, found, expected, ulps=1 if name == "v" else 2)


def _attention_prepare(call: Call) -> Iterator[Measure]:
    pairs = call.arguments[4].shape[1]
    references = ops.attention_prepare_ref(*call.arguments)
    for name, found, expected in zip(_OUTPUTS["attention_prepare"], call.outputs, references, strict=True):
        passed, rotated = slice(2 * pairs, None), slice(0, 2 * pairs)
        yield from _rounded_alike(f"{name} not rotated", found[..., passed], expected[..., passed], ulps=1)
        # A rotation keeps the pair's norm: its operands are no larger.
        low, high = expected[..., :pairs].float(), expected[..., pairs : 2 * pairs].float()
        largest = torch.hypot(low, high).repeat(1, 1, 2)
        yield from _rounded_alike(
            f"{name} rotated", found[..., rotated], expected[..., rotated], ulps=2, largest=largest
        )


# Against float64


def _head_score(call: Call) -> Iterator[Measure]:
    residual, update, rows, norm_weight, head_weight, _, eps = call.arguments
    expected, (found,) = ops.head_score_ref(*call.arguments), call.outputs
    normed = ops.add_rms_norm_ref(residual, update, norm_weight, eps)[1][rows.long()]
    terms = (normed.double() * head_weight.double()).abs().sum(-1)
    off = (found.double() - expected.double()).abs() / terms
    if residual.dtype == torch.float32:
        yield Measure("scores", "off, in the sum of terms", off.max().item(), FLOAT32_ATOL)
        return
    # A norm's element that rounds the other way now and then, one of few in a narrow model.
    yield Measure("scores", "off, in the sum of terms", off.max().item(), 2**-15 + 2**-6 / residual.shape[1])
    yield Measure("scores", "median off, in the sum of terms", off.median().item(), 2**-19)


def _linear(call: Call) -> Iterator[Measure]:
    x, weight = call.arguments
    picked = _picked(len(x), _PRODUCT_ROWS).to(x.device)
    exact = _product(x[picked], weight)
    others = [ops.linear_ref(x[picked], weight), F.linear(x, weight)[picked]]
    yield from _no_further("product", call.outputs[0][picked], exact, others)


def _linear_silu_mul(call: Call) -> Iterator[Measure]:
    x, weight = call.arguments
    picked = _picked(len(x), _PRODUCT_ROWS).to(x.device)
    gate, up = _product(x[picked], weight).chunk(2, dim=1)
    others = [ops.linear_silu_mul_ref(x[picked], weight), ops.silu_mul_ref(F.linear(x, weight)[picked])]
    yield from _no_further("product", call.outputs[0][picked], F.silu(gate) * up, others)


def _linear_update(call: Call) -> Iterator[Measure]:
    x, weight, partials = call.arguments
    if partials == 1:
        yield from _linear(replace(call, arguments=(x, weight)))
        return
    picked = _picked(len(x), _PRODUCT_ROWS).to(x.device)
    # Partial sums are not rounded before the residual add.
    yield _close("sum of the partial sums", call.outputs[0].sum(0)[picked], _product(x[picked], weight))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.double() @ block.double().t() for block in weight.split(_BLOCK)], dim=1)


def _no_further(
    output: str, found: torch.Tensor, exact: torch.Tensor, others: list[torch.Tensor]
) -> Iterator[Measure]:
    """No further from float64 than the furthest of the others; PyTorch's own products may round partial sums too."""
    if found.dtype == torch.float32:
        yield _close(output, found, exact)
        return
    bound = ERROR_RATIO * max(relative_l2(other, exact) for other in others)
    yield Measure(output, "relative L2 to float64", relative_l2(found, exact), bound)
    yield _worst(found, exact, output)


def _worst(found: torch.Tensor, expected: torch.Tensor, output: str = "output") -> Measure:
    worst = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return Measure(output, "worst off, in the largest", worst.item(), LARGEST_SHARE)


def _delta_rule(call: Call) -> Iterator[Measure]:
    forest = call.forest
    # Rows past the forest's are padding.
    rows = len(forest.token)
    found = call.outputs[0][:rows]

    def reference(change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
        q, k, v, g, beta = (change(x[:rows]) for x in call.arguments[:5])
        nodes = forest.node_start, forest.node_length, forest.node_parent
        return ops.delta_rule_ref(q, k, v, g, beta, *nodes, chunk_size=KERNEL_CHUNK)

    if found.dtype == torch.float32:
        yield _close("output", found, reference())
    elif call.portable:
        # Float32 inside, rounded once.
        exact = reference(torch.Tensor.float)
        rounded = exact.to(found.dtype)
        yield _equal_share("output", found, rounded)
        yield from _no_further("output", found, exact.double(), [rounded])
    else:
        expected = reference()
        far = DELTA_RULE_FAR if rows > _FAR_ROWS else DELTA_RULE
        yield Measure("output", "relative L2 to the reference", relative_l2(found, expected), far)
        yield _worst(found, expected)


def _tree_attention(call: Call) -> Iterator[Measure]:
    q, k, v, gate, scale, query_row = call.arguments[:6]
    found: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    magnitude: list[torch.Tensor] = []
    for queries, path, depth in _attended(query_row.cpu().numpy(), call.forest):
        at, rows = (torch.from_numpy(x).to(q.device) for x in (queries, path))
        seen = torch.arange(len(path), device=q.device) <= torch.from_numpy(depth).to(q.device)[:, None]
        given = q[at], k[rows], v[rows], gate[at]
        one, of_magnitudes = _exact_attention(*given, scale, seen)
        exact.append(one)
        magnitude.append(of_magnitudes)
        queries_of_node, keys, values = (x.transpose(0, 1)[None] for x in given[:3])
        out = F.scaled_dot_product_attention(
            queries_of_node, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        theirs.append(ops.gate_mul_ref(out[0].transpose(0, 1), given[3]))
        found.append(call.outputs[0][at])
    if not found:
        return
    ours, all_exact = torch.cat(found), torch.cat(exact)
    if ours.dtype == torch.float32:
        yield _close("output", ours, all_exact)
        return
    bound = ERROR_RATIO * relative_l2(torch.cat(theirs), all_exact)
    yield Measure("output", "relative L2 to float64", relative_l2(ours, all_exact), bound)
    # Each softmax weight is rounded by at most half of 2^-8; output, gate and product are rounded.
    allowed = 3 * bfloat16_ulp(all_exact) + 2**-8 * torch.cat(magnitude)
    yield Measure(
        "output", "element off, in its tolerance", ((ours - all_exact).abs() / allowed).max().item(), 1.0
    )


def _attended(query_row: np.ndarray, forest: Forest) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of some nodes: queries [M], the rows of the node's path [L], and the last of them each query sees, by index."""
    rows = len(forest.token)
    node_of_query = np.where(query_row < rows, forest.node[np.minimum(query_row, rows - 1)], -1)
    nodes = np.unique(node_of_query[node_of_query >= 0])
    for node in nodes[_picked(len(nodes), _NODES).numpy()].tolist():
        queries = np.flatnonzero(node_of_query == node)[-_QUERIES:]
        path = np.arange(forest.node_start[node], forest.node_start[node] + forest.node_length[node])
        while (node := int(forest.node_parent[node])) >= 0:
            start = int(forest.node_start[node])
            path = np.concatenate([np.arange(start, start + int(forest.node_length[node])), path])
        yield queries, path, query_row[queries] - path[-1] + len(path) - 1


def _exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, scale: float, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated attention in float64 [M, HQ * D] of q [M, HQ, D] over k, v [L, HKV, D], and of the values' magnitudes."""
    queries, key_heads, factor = len(q), k.shape[1], torch.sigmoid(gate.double())
    groups = q.shape[1] // key_heads
    # [key heads, queries and their groups, dim] by [key heads, keys, dim].
    by_key_head = q.double().unflatten(1, (key_heads, groups)).permute(1, 0, 2, 3).flatten(1, 2)
    keys, values = (x.double().transpose(0, 1) for x in (k, v))
    score = (by_key_head @ keys.mT * scale).masked_fill(~seen.repeat_interleave(groups, 0), -torch.inf)
    weight = torch.softmax(score, dim=-1)

    def gated(of: torch.Tensor) -> torch.Tensor:
        out = (weight @ of).unflatten(1, (queries, groups)).transpose(0, 1).flatten(1, 2)
        return (out * factor).flatten(1)

    return gated(values), gated(values.abs())


def _picked(count: int, most: int) -> torch.Tensor:
    """Indices of at most `most` of `count` things, evenly spread, first and last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long() if count else torch.arange(0)


_OUTPUTS = {
    "add_rms_norm": ("hidden", "normed"),
    "attention_prepare": ("q", "k"),
    "delta_prepare": ("q", "k", "v", "g", "beta"),
}
_CHECKS: dict[str, Callable[[Call], Iterator[Measure]]] = {
    "add_rms_norm": _add_rms_norm,
    "attention_prepare": _attention_prepare,
    "delta_prepare": _delta_prepare,
    "delta_rule": _delta_rule,
    "gate_mul": _gate_mul,
    "gated_rms_norm": _gated_rms_norm,
    "head_score": _head_score,
    "linear": _linear,
    "linear_silu_mul": _linear_silu_mul,
    "linear_update": _linear_update,
    "silu_mul": _silu_mul,
    "tree_attention": _tree_attention,
}
