"""The graph backend on a GPU: replays against the same modules run eagerly, eviction, and no synchronisation."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from decisions import question, text
from jev.api import compile_request
from jev.model import DecisionModel
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from openjev_fast_plugin import engine as fast_engine
from openjev_fast_plugin import weights as model_weights
from openjev_fast_plugin.build import BuildError
from openjev_fast_plugin.graphs import CapturedAtOnce
from openjev_fast_plugin.measurement.originals import use_delta_rule
from openjev_fast_plugin.padded import PaddedBatch, padded_forward
from openjev_fast_plugin.patches import transformers_masks
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.takeover import accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
VOCABULARY = 2048
PAD = 0
LENGTHS = {
    "example": [82, 80, 78, 69, 78, 77, 75],
    "noul_70": [70],
    "noul_1500": [1500],
    "unpadded": [40, 40, 40],
    "one_token": [1],
    "one_token_beside_another": [1, 2],
    "over_a_chunk": [65, 64, 129],
}
DELTA_RULES = ["torch", *(["fla"] if upstream.chunk_gated_delta_rule is not None else [])]


@pytest.fixture(scope="module")
def parts() -> tuple[upstream.Qwen3_5TextModel, torch.nn.Linear]:
    config = text_config("2b", 4, VOCABULARY)
    return text_model(config, DEVICE, 0), head(config.hidden_size, DEVICE, 0)


@pytest.fixture(params=DELTA_RULES)
def forward(parts, request):
    use_delta_rule(parts[0], request.param)
    return partial(padded_forward, *parts)


def batch_of(lengths: list[int], seed: int = 0) -> PaddedBatch:
    """Other tokens for every seed, and the lengths turned, so that other prompts are padded."""
    draw = np.random.default_rng(seed)
    turned = np.roll(lengths, seed).tolist()
    return PaddedBatch.of([draw.integers(0, VOCABULARY, length) for length in turned], PAD)


def on_device(batch: PaddedBatch) -> PaddedBatch:
    return batch.unpack(batch.pack().to(DEVICE))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@torch.inference_mode()
def test_replay_equals_eager_with_changed_inputs(forward, lengths):
    graphs = CapturedAtOnce(forward, DEVICE)
    batches = [batch_of(lengths, seed) for seed in range(3)]
    eager = [forward(on_device(batch)) for batch in batches]
    assert all(torch.isfinite(scores).all() for scores in eager) and not torch.equal(eager[0], eager[1])
    scores, how = graphs(batches[0])
    assert how == "captures" and torch.equal(scores, eager[0])
    for _ in range(2):
        for batch, expected in zip(batches, eager, strict=True):
            scores, how = graphs(batch)
            assert how == "replays" and torch.equal(scores, expected)
    assert graphs.counts == {"replays": 6, "eager": 0, "captures": 1, "evictions": 0}


@torch.inference_mode()
def test_a_padded_batch_scores_as_the_unpatched_modules_score_it(parts, forward):
    model, scalar = parts
    batch = on_device(batch_of(LENGTHS["example"]))
    mask = (torch.arange(batch.token.shape[1], device=DEVICE) < batch.length[:, None]).long()
    hidden = model(input_ids=batch.token, attention_mask=mask, use_cache=False).last_hidden_state
    last = torch.stack([row[length - 1] for row, length in zip(hidden, batch.length.tolist(), strict=True)])
    assert torch.equal(forward(batch), scalar(last.float()).squeeze(-1))


@torch.inference_mode()
def test_nothing_waits_for_the_device(parts, forward):
    batches = [on_device(batch_of(lengths)) for lengths in LENGTHS.values()]
    for batch in batches:
        # Triton may look and measure the first time.
        forward(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            forward(batch)
        with transformers_masks.applied(), pytest.raises(RuntimeError, match="synchronizing"):
            parts[0](input_ids=batches[0].token, attention_mask=None, use_cache=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_graphs_go_by_count_and_give_their_memory_back(forward):
    graphs = CapturedAtOnce(forward, DEVICE, most_graphs=1)
    large, small = batch_of([1500]), batch_of([10])

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(DEVICE)[0]

    # Libraries keep what they take during the first capture of a process.
    CapturedAtOnce(forward, DEVICE)(small)
    graphs(large)
    held, with_large = graphs.held_bytes, free()
    assert held > 16 << 20
    assert graphs(small)[1] == "captures" and graphs.counts["evictions"] == 1
    assert free() - with_large > held / 2
    assert graphs(small)[1] == "replays" and graphs(large)[1] == "captures"


@torch.inference_mode()
def test_graphs_go_by_memory(forward):
    graphs = CapturedAtOnce(forward, DEVICE, most_bytes=1)
    for lengths in ([70], [80], [90]):
        assert graphs(batch_of(lengths))[1] == "captures"
        assert graphs.held_bytes > 0
    assert graphs.counts["evictions"] == 2
    assert graphs(batch_of([90], 1))[1] == "replays"


def test_threads_share_the_graphs(forward):
    graphs = CapturedAtOnce(forward, DEVICE)
    batches = [batch_of(lengths, seed) for lengths in ([20], [30, 10], [20]) for seed in range(3)]
    with torch.inference_mode():
        expected = [forward(on_device(batch)) for batch in batches]
    wrong: list[int] = []

    @torch.inference_mode()
    def ask(offset: int) -> None:
        for turn in range(2 * len(batches)):
            index = (turn + offset) % len(batches)
            if not torch.equal(graphs(batches[index])[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert graphs.counts == {"replays": 70, "eager": 0, "captures": 2, "evictions": 0}


# Through Open-Jev's own model


def records(seed: int, options: int = 3) -> list[dict]:
    questions = {"a": question("choice", options, seed), "b": question("noul", 1, seed)}
    return compile_request(text(30, seed), questions)


def test_a_checkpoint_answers_as_its_merged_modules_do(tiny_checkpoint):
    model = accelerate(DecisionModel.load(tiny_checkpoint, "cuda:0"), "graph")
    host = DecisionModel.load(tiny_checkpoint, "cuda:0")
    host.backbone = model_weights.merge_adapters(host.backbone)
    for how in ("graph_captures", "graph_replays"):
        for seed in range(3):
            found = model(records(seed, 2 + seed))
            with torch.inference_mode(), transformers_masks.applied():
                expected = host(records(seed, 2 + seed))
            assert torch.equal(torch.cat(found), torch.cat(expected).cpu())
            assert (model.last_stats["forwards"], model.last_stats[how]) == (1, 1)
    about = model.openjev_fast.describe()
    assert (about["name"], about["device"], about["dtype"]) == ("graph", "cuda:0", "bfloat16")
    fla = "fla" if upstream.chunk_gated_delta_rule is not None else "pytorch"
    assert f"delta rule {fla}, convolution " in about["kernels"]


def test_auto_takes_it_where_the_kernels_cannot_be_built(tiny_checkpoint, monkeypatch):
    def fails(*_):
        raise BuildError("no nvcc")

    monkeypatch.setattr(fast_engine, "portable_ops", fails)
    model = accelerate(DecisionModel.load(tiny_checkpoint, "cuda:0"), "auto")
    assert (model.openjev_fast.name, model.openjev_fast.reason) == ("graph", "fast: no nvcc")
    assert torch.cat(model(records(0))).isfinite().all()
