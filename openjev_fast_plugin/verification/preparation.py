"""What comes before the first op: the prompts' ids, the tree they form, and the weights as they were taken over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from openjev_fast_plugin.forest import Forest
from openjev_fast_plugin.weights import LinearAttentionWeights, Weights, text_model

from .cases import Case

# Rows of a weight that are converted to float64 at a time.
_BLOCK = 4096
# How much a row may be off, in its largest element. Merging an adapter in another order may round an element to its
# neighbour, and float32 sums differ by less; what was not merged has the same bits, summed in another order at most.
_MERGED = {torch.bfloat16: 2**-6, torch.float32: 1e-5}
_UNTOUCHED = 1e-9


def check_tree(case: Case, forest: Forest) -> list[str]:
    """What is wrong with a forest of a case's prompts; empty where every path spells its prompt."""
    if len(forest.token) != case.rows:
        return [f"{len(forest.token)} rows for {case.rows} distinct prefixes"]
    wrong = []
    for index, sequence in enumerate(case.sequences):
        path = path_rows(forest.predecessor, int(forest.read_row[forest.candidate_read[index]]))
        if not np.array_equal(forest.token[path], sequence):
            wrong.append(f"{case.candidate(index)}: its path does not spell its prompt")
        elif not np.array_equal(forest.position[path], np.arange(len(path))):
            wrong.append(f"{case.candidate(index)}: positions along its path are not 0, 1, 2, ...")
        else:
            back = [np.concatenate([[-1] * steps, path[:-steps]])[: len(path)] for steps in (1, 2, 3)]
            if not np.array_equal(forest.predecessor[path], np.stack(back, axis=1)):
                wrong.append(f"{case.candidate(index)}: a row's three predecessors are not those of its path")
    return wrong + list(_wrong_nodes(forest))


def path_rows(predecessor: np.ndarray, row: int) -> np.ndarray:
    """Rows from a path's start to `row`, by the first column of `predecessor` [N, 3]."""
    path: list[int] = []
    while row >= 0 and len(path) <= len(predecessor):
        path.append(row)
        row = int(predecessor[row, 0])
    return np.array(path[::-1], dtype=np.int64)


def _wrong_nodes(forest: Forest) -> Iterator[str]:
    """Nodes whose rows or parent contradict the rows' predecessors, which `check_tree` holds against the prompts."""
    for node, start in enumerate(forest.node_start.tolist()):
        stop = start + int(forest.node_length[node])
        if not (forest.node[start:stop] == node).all():
            yield f"node {node} holds rows {start} to {stop - 1}, which name other nodes as theirs"
        before, parent = int(forest.predecessor[start, 0]), int(forest.node_parent[node])
        wanted = -1 if before < 0 else int(forest.node[before])
        if parent != wanted:
            yield f"node {node} (rows {start} to {stop - 1}) has parent {parent}, its rows continue node {wanted}"


# Weights


class Fingerprints:
    """Each row of each weight as one number, its product with random signs, to compare two models without both.

    Adapters are merged by PEFT here, by `weights` in the models compared.
    """

    def __init__(self, backbone: Any):
        self._rows: dict[str, torch.Tensor] = {}
        self._bound: dict[str, torch.Tensor] = {}
        for name, weight, merged in _weights_of(text_model(backbone)):
            self._rows[name] = _fingerprint(weight)
            self._bound[name] = (_MERGED[weight.dtype] if merged else _UNTOUCHED) * _largest(weight)

    def __len__(self) -> int:
        """Rows of all weights."""
        return sum(map(len, self._rows.values()))

    def differences(self, others: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
        """Weights that are not the original's, by name, and what is wrong with each."""
        wrong, seen = [], set()
        for name, weight in others:
            seen.add(name)
            if name not in self._rows:
                wrong.append((name, "the original has no such weight"))
                continue
            found, expected = _fingerprint(weight), self._rows[name]
            if found.shape != expected.shape:
                wrong.append((name, f"{len(found)} rows, the original's has {len(expected)}"))
                continue
            # Not (a <= b): what is not a number is no match.
            off = ~((found - expected).abs() <= self._bound[name])
            if off.any():
                rows = off.nonzero().flatten().tolist()
                shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
                wrong.append((name, f"{len(rows)} of {len(off)} rows are not the original's: {shown}"))
        return wrong + [(name, "missing") for name in self._rows if name not in seen]


def _weights_of(text: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every weight of a text model by its path, adapters merged by PEFT, and whether there was one."""
    inside = set()
    for path, module in text.named_modules():
        if isinstance(module, LoraLinear):
            inside.add(path)
            base: Any = module.base_layer
            weight = base.weight.detach()
            if not module.merged and not module.disable_adapters:
                merged = weight.float()
                for adapter in module.active_adapters:
                    if adapter in module.lora_A:
                        merged = merged + module.get_delta_weight(adapter).float()
                weight = merged.to(weight.dtype)
            yield f"{path}.weight", weight, True
        elif not any(path.startswith(f"{outer}.") for outer in inside):
            for name, parameter in module.named_parameters(path, recurse=False):
                yield name, parameter.detach(), False


def module_weights(text: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a text model whose adapters were merged in place, by their paths."""
    for name, parameter in text.named_parameters():
        yield name, parameter.detach()


def fused_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a packed forward by the paths of the modules they were taken from."""
    shapes = weights.shapes
    yield "embed_tokens.weight", weights.embedding
    yield "norm.weight", weights.final_norm
    for index, layer in enumerate(weights.layers):
        path, mixer = f"layers.{index}", layer.mixer
        if isinstance(mixer, LinearAttentionWeights):
            sizes = [shapes.conv_channels, shapes.value_heads * shapes.value_dim, *[shapes.value_heads] * 2]
            names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
            path_of_mixer, output = f"{path}.linear_attn", "out_proj"
            yield f"{path_of_mixer}.conv1d.weight", mixer.conv
            yield f"{path_of_mixer}.A_log", mixer.a_log
            yield f"{path_of_mixer}.dt_bias", mixer.dt_bias
            yield f"{path_of_mixer}.norm.weight", mixer.norm
        else:
            width = shapes.kv_heads * shapes.head_dim
            sizes, names = (
                [2 * shapes.query_heads * shapes.head_dim, width, width],
                ["q_proj", "k_proj", "v_proj"],
            )
            path_of_mixer, output = f"{path}.self_attn", "o_proj"
            yield f"{path_of_mixer}.q_norm.weight", mixer.q_norm
            yield f"{path_of_mixer}.k_norm.weight", mixer.k_norm
        for name, piece in zip(names, mixer.project.split(sizes), strict=True):
            yield f"{path_of_mixer}.{name}.weight", piece
        yield f"{path_of_mixer}.{output}.weight", mixer.output
        yield f"{path}.input_layernorm.weight", layer.input_norm
        yield f"{path}.post_attention_layernorm.weight", layer.post_norm
        gate, up = layer.gate_up.chunk(2)
        yield f"{path}.mlp.gate_proj.weight", gate
        yield f"{path}.mlp.up_proj.weight", up
        yield f"{path}.mlp.down_proj.weight", layer.down


def _fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """[rows] float64 on the host; a vector's elements are its rows."""
    flat = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
    signs = np.random.default_rng(flat.shape[1]).choice([-1.0, 1.0], flat.shape[1])
    by = torch.from_numpy(signs).to(weight.device)
    return torch.cat([block.double() @ by for block in flat.split(_BLOCK)]).cpu()


def _largest(weight: torch.Tensor) -> torch.Tensor:
    """[rows], the largest magnitude in each."""
    flat = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
    return torch.cat([block.abs().amax(1).double() for block in flat.split(_BLOCK)]).cpu()
