"""The ops benchmark's registry: every op with its cases and variants, built on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import numpy as np
import op_inputs
import torch
from op_baselines import Rectangle, candidate_rows, dense_mask, fla_levels, fla_padded, sdpa
from op_inputs import Profile
from op_registry import Prepared, Problem, Variant, Way, bytes_of, copies, tensors
from prompt_cases import prompts

from openjev_fast_plugin import ops
from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import Forest, build_forest
from openjev_fast_plugin.layout import Layout, build_layout
from openjev_fast_plugin.ops.tree_attention import LARGE_TILE, SMALL_TILE

OURS = "openjev_fast"
# Our attention in the tiles that the engine does not have at a number of queries.
OTHER_TILES = "other_tiles"
TREE_CASES = (
    "example",
    "noul_70",
    "noul_1500",
    "choice_8x1000",
    "choice_32x1056",
    "root_10000",
    "root_10000_tails_32",
)
ELEMENTWISE_CASES = ("example", "noul_70", "choice_32x1056")
# A dense mask beyond this is what a tree's row ranges are there to avoid.
_MOST_MASK_BYTES = 64 << 20
# Query rows compared with exact attention, at most, evenly spaced.
_MOST_COMPARED = 1712


@dataclass(frozen=True)
class Setting:
    """Where and on what shapes problems are built.

    cache_bytes: see `op_registry.copies`. few_queries: the most queries that attention has in small tiles.
    """

    profile: Profile
    device: torch.device
    cache_bytes: int
    few_queries: int = 0


@dataclass(frozen=True)
class Op:
    """cases: those run by default. build: the problem of one case."""

    cases: tuple[str, ...]
    build: Callable[[str, Setting], Problem]


def layout_of(case: str, few_queries: int = 0) -> tuple[Forest, Layout]:
    """A case's forest, and its layout on the host as the forward pads it. few_queries: see `build_layout`."""
    forest = build_forest(prompts(case, 32_768))
    return forest, build_layout(forest, CUDA_BUCKET, few_queries=few_queries)


def delta_problem(case: str, setting: Setting) -> Problem:
    """The delta rule of one layer on a slow decay, where rounding shows most."""
    forest, layout = layout_of(case)
    rows, plan = len(forest.token), layout.to(setting.device).delta
    given = op_inputs.delta_rule(setting.profile, layout.rows, "slow", device=str(setting.device))

    @functools.cache
    def exact() -> torch.Tensor:
        tables = forest.node_start, forest.node_length, forest.node_parent
        return op_inputs.exact_delta_rule([x[:rows] for x in given], *tables)

    def ours() -> Prepared:
        calls = [partial(ops.delta_rule, *one, plan) for one in copies(given, setting.cache_bytes)]
        return Prepared(calls, lambda output: [(output[:rows], exact())], layout.rows)

    baselines = {"fla_padded": fla_padded, "fla_levels": fla_levels}
    return Problem(
        op="delta",
        case=case,
        against="the recurrence in float64, decay g from -1e-2 to -1e-4",
        variants=[
            Variant(OURS, [Way("packed rows", ours)]),
            *(
                Variant(name, ways(forest, given, exact, setting.cache_bytes), first=True)
                for name, ways in baselines.items()
            ),
        ],
    )


def attention_problem(case: str, setting: Setting) -> Problem:
    """Attention of one layer and its gate, every row a query; in the tiles the engine has, and in the other ones."""
    forest, layout = layout_of(case, setting.few_queries)
    device, rows, dim = setting.device, len(forest.token), setting.profile.head_dim
    plan = layout.to(device).attention
    small = plan.tile_queries == SMALL_TILE
    given = op_inputs.tree_attention(setting.profile, layout.rows, layout.rows, device=str(device))
    q, k, v, gate, scale = given
    sample = np.unique(np.linspace(0, rows - 1, min(rows, _MOST_COMPARED)).round().astype(np.int64))
    compared = torch.from_numpy(sample).to(device)

    @functools.cache
    def exact() -> torch.Tensor:
        tables = forest.node_start, forest.node_length, forest.node_parent
        queries = (q[compared], k, v, gate[compared], scale)
        return op_inputs.exact_attention(queries, *tables, sample, forest.node[sample])[0]

    def ours(plan: ops.AttentionPlan) -> Prepared:
        sets = copies(given, setting.cache_bytes)
        calls = [partial(ops.tree_attention, *one, plan) for one in sets]
        return Prepared(calls, lambda output: [(output[compared], exact())], layout.rows)

    def other() -> Prepared:
        return ours(layout_of(case, 0 if small else layout.rows)[1].to(device).attention)

    def laid_out(sequences: list[np.ndarray]) -> list[Way]:
        """Attention of sequences padded to one length, made when a way is prepared and not kept."""
        rectangle = Rectangle.of(sequences, rows, device)
        held = rectangle.place[compared]
        there = held >= 0

        def compare(output: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(output[held[there]], exact()[there])]

        def inputs() -> list[torch.Tensor]:
            return [*map(rectangle.lay_out, (q, k, v)), rectangle.lay_out(gate).flatten(0, 1)]

        return sdpa(inputs, scale, compare, setting.cache_bytes)

    mask_bytes = layout.rows**2 * q.element_size()
    dense = sdpa(
        lambda: [*(x[None] for x in (q, k, v)), gate],
        scale,
        lambda output: [(output[compared], exact())],
        setting.cache_bytes,
        mask=lambda: dense_mask(forest, layout.rows, q.dtype, device),
    )
    too_big = f"its mask would take {mask_bytes >> 20} MiB, more than {_MOST_MASK_BYTES >> 20}"
    variants = [
        Variant(
            OURS, [Way(f"heads of {dim}, packed rows, tiles of {plan.tile_queries}", partial(ours, plan))]
        ),
        Variant(OTHER_TILES, [Way(f"tiles of {LARGE_TILE if small else SMALL_TILE}", other)]),
        Variant("sdpa_padded", laid_out(candidate_rows(forest)), may_refuse=True),
        Variant(
            "sdpa_dense", dense, may_refuse=True, skipped=too_big if mask_bytes > _MOST_MASK_BYTES else None
        ),
    ]
    if case.startswith("root_"):
        root = np.arange(int(forest.node_length[0]))
        variants.append(Variant("sdpa_root", laid_out([root]), may_refuse=True))
    return Problem(
        op="attention",
        case=case,
        against=f"attention over gathered paths in float64, {len(sample)} queries",
        variants=variants,
    )


def elementwise_problem(name: str, options: dict[str, int | None], label: str) -> Callable:
    """The builder of an op that takes rows: `torch` is the faster of its reference and its portable form."""

    def build(case: str, setting: Setting) -> Problem:
        _, layout = layout_of(case)
        # The head is given the read rows alone.
        rows = len(layout.read_row) if name == "head_score" else layout.rows
        torch.manual_seed(0)
        given = op_inputs.CASES[name](setting.profile, rows, **options, device=str(setting.device))
        if name == "head_score":
            every = torch.arange(rows, dtype=torch.int32, device=setting.device)
            given = (*given[:2], every, *given[3:])
        op, reference = getattr(ops, name), getattr(ops, f"{name}_ref")
        portable = import_module(f"openjev_fast_plugin.ops.{name}")._portable
        expected = list(tensors(reference(*given)))

        def prepare(function: Callable) -> Prepared:
            calls = [partial(function, *one) for one in copies(given, setting.cache_bytes)]
            return Prepared(calls, lambda out: list(zip(tensors(out), expected, strict=True)), rows)

        return Problem(
            op=label,
            case=case,
            against=f"{name}_ref",
            variants=[
                Variant(OURS, [Way("op", partial(prepare, op))]),
                Variant(
                    "torch",
                    [
                        Way("portable", partial(prepare, portable)),
                        Way("reference", partial(prepare, reference)),
                    ],
                ),
            ],
            moved=bytes_of(given) + bytes_of(expected),
        )

    return build


def _registry() -> dict[str, Op]:
    found = {"delta": Op(TREE_CASES, delta_problem), "attention": Op(TREE_CASES, attention_problem)}
    # With an update of the model's dtype, without one, and with partial sums of a matmul split along K.
    partials = {"": -1, "_none": None, "_s1": 1, "_s2": 2, "_s4": 4}
    labels = {f"add_rms_norm{end}": ("add_rms_norm", {"partials": count}) for end, count in partials.items()}
    labels |= {name: (name, {}) for name in op_inputs.CASES if name != "add_rms_norm"}
    for label, (name, options) in labels.items():
        found[label] = Op(ELEMENTWISE_CASES, elementwise_problem(name, options, label))
    return found


OPS = _registry()
