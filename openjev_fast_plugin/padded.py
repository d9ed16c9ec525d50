"""Prompts as Open-Jev batches them, each padded to the longest, and its model's forward without synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .patches import transformers_masks


@dataclass(frozen=True)
class PaddedBatch:
    """B prompts of at most T tokens, padded on the right.

    token: [B, T] int64. length: [B] int64, at least 1.
    """

    token: torch.Tensor
    length: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], pad: int) -> PaddedBatch:
        """The batch of these token sequences on the host, T the longest one's length; pad: id of the padding token."""
        lengths = [len(sequence) for sequence in sequences]
        token = np.full((len(sequences), max(lengths)), pad, dtype=np.int64)
        for row, sequence in zip(token, sequences, strict=True):
            row[: len(sequence)] = sequence
        return cls(torch.from_numpy(token), torch.tensor(lengths))

    @property
    def rows(self) -> int:
        return self.token.numel()

    def shape_key(self) -> tuple[int, int]:
        """(B, T)."""
        batch, longest = self.token.shape
        return batch, longest

    def pack(self, pinned: bool = False) -> torch.Tensor:
        """Tokens and lengths in one int64 tensor [B T + B]; pinned: in page-locked memory."""
        size = self.token.numel() + self.length.numel()
        packed = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        return torch.cat([self.token.flatten(), self.length], out=packed)

    def unpack(self, packed: torch.Tensor) -> PaddedBatch:
        """A batch of this one's shape over the values in `packed`."""
        token, length = packed.split([self.token.numel(), self.length.numel()])
        return PaddedBatch(token.view_as(self.token), length)


def split_padded(lengths: Sequence[int], max_rows: int) -> list[slice]:
    """Cut prompts into batches of at most max_rows padded rows each, a batch's prompts times the longest of them.

    lengths: tokens of each prompt. The batches keep the prompts' order, and each takes as many as fit.
    Raises ValueError for a prompt longer than max_rows.
    """
    batches, first, longest = [], 0, 0
    for index, length in enumerate(lengths):
        if length > max_rows:
            raise ValueError(
                f"a sequence of {length} tokens does not fit into one forward of at most {max_rows} rows"
            )
        longest = max(longest, length)
        if (index + 1 - first) * longest > max_rows:
            batches.append(slice(first, index))
            first, longest = index, length
    return [*batches, slice(first, len(lengths))]


def padded_forward(model: Any, head: torch.nn.Linear, batch: PaddedBatch) -> torch.Tensor:
    """Scores [B] of a batch on the model's device, as Open-Jev's `DecisionModel.forward` computes them.

    model: a Qwen3.5 text model. head: the scalar head, applied in its own dtype to each prompt's last hidden state.

    The padding mask is always given, whether anything is padded or not: without one, Transformers looks for packed
    sequences in the positions, which waits for the device just as the checks do that the mask patches take out.
    """
    longest = batch.token.shape[1]
    position = torch.arange(longest, device=batch.token.device)
    mask = (position < batch.length[:, None]).long()
    with transformers_masks.applied():
        hidden = model(input_ids=batch.token, attention_mask=mask, use_cache=False).last_hidden_state
    each = torch.arange(len(batch.token), device=batch.token.device)
    return head(hidden[each, batch.length - 1].to(head.weight.dtype)).squeeze(-1)
