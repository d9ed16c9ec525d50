"""Weights of few layers drawn on the GPU, and forests laid out for them: what tests of whole forwards share."""

from __future__ import annotations

import torch
from prompt_cases import prompts

from openjev_fast_plugin.engine import CUDA_BUCKET
from openjev_fast_plugin.forest import build_forest
from openjev_fast_plugin.layout import Layout, build_layout
from openjev_fast_plugin.random_models import head, text_config, text_model
from openjev_fast_plugin.weights import Weights, take_weights

DEVICE = torch.device("cuda", 0)
VOCABULARY = 2048
# Cases have fewer rows and more: attention runs in both sizes of tile.
FEW_QUERIES = 330
CASES = ("example", "noul_70", "noul_1500", "choice_8x200")


def fused(profile: str, layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The same weights for the same arguments."""
    config = text_config(profile, layers, VOCABULARY)
    return take_weights(text_model(config, DEVICE, 0, dtype), head(config.hidden_size, DEVICE, 0))


def layout_of(case: str, seed: int = 0) -> Layout:
    """A case's prompts laid out for the kernels, on the host."""
    return build_layout(build_forest(prompts(case, VOCABULARY, seed)), CUDA_BUCKET, False, FEW_QUERIES)
