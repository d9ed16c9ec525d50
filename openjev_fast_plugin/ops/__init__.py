"""Public ops of the packed forward, each beside its readable reference; also ``torch.ops.openjev_fast.<op>``."""

import openjev_fast_plugin.ops._cuda  # noqa: F401 (registers the CUDA implementations)
from openjev_fast_plugin.ops.add_rms_norm import add_rms_norm, add_rms_norm_ref
from openjev_fast_plugin.ops.attention_prepare import attention_prepare, attention_prepare_ref
from openjev_fast_plugin.ops.delta_prepare import delta_prepare, delta_prepare_ref
from openjev_fast_plugin.ops.delta_rule import DeltaPlan, delta_rule, delta_rule_ref, plan_delta_rule
from openjev_fast_plugin.ops.gate_mul import gate_mul, gate_mul_ref
from openjev_fast_plugin.ops.gated_rms_norm import gated_rms_norm, gated_rms_norm_ref
from openjev_fast_plugin.ops.head_score import head_score, head_score_ref
from openjev_fast_plugin.ops.linear import (
    linear,
    linear_ref,
    linear_silu_mul,
    linear_silu_mul_ref,
    linear_update,
    linear_update_ref,
)
from openjev_fast_plugin.ops.silu_mul import silu_mul, silu_mul_ref
from openjev_fast_plugin.ops.tree_attention import (
    AttentionPlan,
    plan_attention,
    tree_attention,
    tree_attention_ref,
)

__all__ = [
    "AttentionPlan",
    "DeltaPlan",
    "add_rms_norm",
    "add_rms_norm_ref",
    "attention_prepare",
    "attention_prepare_ref",
    "delta_prepare",
    "delta_prepare_ref",
    "delta_rule",
    "delta_rule_ref",
    "gate_mul",
    "gate_mul_ref",
    "gated_rms_norm",
    "gated_rms_norm_ref",
    "head_score",
    "head_score_ref",
    "linear",
    "linear_ref",
    "linear_silu_mul",
    "linear_silu_mul_ref",
    "linear_update",
    "linear_update_ref",
    "plan_attention",
    "plan_delta_rule",
    "silu_mul",
    "silu_mul_ref",
    "tree_attention",
    "tree_attention_ref",
]
