"""Padded batches: how prompts are cut into them, and the forward over one against the host's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_models import smallest_text_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5TextModel

from openjev_fast_plugin.padded import PaddedBatch, padded_forward, split_padded
from openjev_fast_plugin.patches import transformers_masks

PAD = 7
LENGTHS = {
    "padded": [9, 1, 5],
    "unpadded": [9, 9],
    "one": [7],
    "one_token": [1],
    "one_token_each": [1, 1],
    "over_a_chunk": [65, 64],
}


@pytest.fixture(scope="module")
def model() -> Qwen3_5TextModel:
    return smallest_text_model().bfloat16()


@pytest.fixture(scope="module")
def head() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(32, 1)


def prompts(lengths: list[int]) -> list[np.ndarray]:
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(0, 64, length).astype(np.int32) for length in lengths]


def inputs_of_host(sequences) -> dict[str, torch.Tensor]:
    """The host's padding and mask, from ragged lists."""
    longest = max(map(len, sequences))
    return {
        "input_ids": torch.tensor(
            [[*sequence.tolist(), *[PAD] * (longest - len(sequence))] for sequence in sequences]
        ),
        "attention_mask": torch.tensor(
            [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
        ),
    }


def scores_of_host(model, head, sequences) -> torch.Tensor:
    hidden = model(**inputs_of_host(sequences), use_cache=False).last_hidden_state
    last = torch.stack([hidden[row, len(sequence) - 1] for row, sequence in enumerate(sequences)])
    return head(last.float()).squeeze(-1)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_scores_are_those_of_the_host_with_the_same_masks(model, head, lengths):
    sequences = prompts(lengths)
    with torch.inference_mode():
        found = padded_forward(model, head, PaddedBatch.of(sequences, PAD))
        with transformers_masks.applied():
            expected = scores_of_host(model, head, sequences)
        unpatched = scores_of_host(model, head, sequences)
    assert torch.equal(found, expected)
    if len(set(lengths)) > 1:
        # Where something is padded, the original takes the same masks of its own accord.
        assert torch.equal(found, unpatched)
    torch.testing.assert_close(found, unpatched, atol=0.02, rtol=0)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_model_is_called_as_the_host_calls_it(model, head, lengths):
    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return model(**arguments)

    sequences = prompts(lengths)
    with torch.inference_mode():
        padded_forward(spy, head, PaddedBatch.of(sequences, PAD))
    assert seen.pop("use_cache") is False
    expected = inputs_of_host(sequences)
    assert seen.keys() == expected.keys()
    for name, found in seen.items():
        assert torch.equal(found, expected[name]) and found.dtype == expected[name].dtype, name


def test_padding_reaches_no_prompt(model, head):
    sequences = prompts([9, 1, 5])
    with torch.inference_mode():
        first, second = (
            padded_forward(model, head, PaddedBatch.of(sequences, pad)) for pad in (PAD, PAD + 1)
        )
    assert torch.equal(first, second)


class Looks(TorchDispatchMode):
    """Notes every operation that hands a tensor's value to the host, which waits for the device there."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_nothing_looks_at_a_value(model, head, lengths):
    batch = PaddedBatch.of(prompts(lengths), PAD)
    with Looks() as looks, torch.no_grad():
        padded_forward(model, head, batch)
    assert looks.seen == []


def test_without_a_mask_something_would(model):
    ids = torch.from_numpy(prompts([9])[0])[None].long()
    with transformers_masks.applied(), Looks() as looks, torch.no_grad():
        model(input_ids=ids, attention_mask=None, use_cache=False)
    assert looks.seen != []


def test_a_batch_packs_into_one_tensor_and_back():
    batch = PaddedBatch.of(prompts([3, 1, 4]), PAD)
    assert batch.token.tolist() == [
        [*prompt, *[PAD] * (4 - len(prompt))] for prompt in map(list, prompts([3, 1, 4]))
    ]
    assert batch.length.tolist() == [3, 1, 4]
    assert (batch.rows, batch.shape_key()) == (12, (3, 4))
    other = PaddedBatch.of(prompts([4, 2, 1]), PAD)
    assert other.shape_key() == batch.shape_key()
    found = batch.unpack(other.pack())
    assert torch.equal(found.token, other.token) and torch.equal(found.length, other.length)
    assert found.token.dtype == found.length.dtype == torch.int64


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 300))
def test_batches_hold_every_prompt_in_order_and_as_many_as_fit(lengths, max_rows):
    batches = split_padded(lengths, max_rows)
    assert [index for span in batches for index in range(len(lengths))[span]] == list(range(len(lengths)))
    for span in batches:
        held = lengths[span]
        assert len(held) * max(held) <= max_rows
        following = lengths[span.stop : span.stop + 1]
        assert not following or (len(held) + 1) * max(held + following) > max_rows


def test_a_prompt_that_fits_no_batch_is_refused_by_name():
    assert split_padded([5, 5], 5) == [slice(0, 1), slice(1, 2)]
    with pytest.raises(ValueError, match="6 tokens does not fit into one forward of at most 5 rows"):
        split_padded([5, 6, 5], 5)
