"""Model families as data: a base record, derivation of new ones, and the plugin class of a record.

Torch-free. For built-in and third-party families alike.
"""

from .decoder import (
    DECODER,
    attention_bias,
    fused_gate_up,
    fused_qkv,
    mlp_bias,
)
from .deepseek import deepseek_expert_keys, deepseek_expert_tensors, group_keys
from .derivation import derived
from .experts import (
    EXPERT_DEFAULTS,
    SPARSE,
    expert_tensors,
    normalized_topk,
    router_keys,
    shared_expert_tensors,
)
from .gemma import GEMMA, WINDOWED_GEMMA
from .latent import latent_keys, latent_tensors, needs_latent_attention
from .plugin import DENSE, FamilyPlugin, family_manifest
from .scaling import scaling_factors
from .windows import layer_types, optional_window, sliding_window

__all__ = [
    "DECODER",
    "DENSE",
    "EXPERT_DEFAULTS",
    "GEMMA",
    "SPARSE",
    "WINDOWED_GEMMA",
    "FamilyPlugin",
    "attention_bias",
    "deepseek_expert_keys",
    "deepseek_expert_tensors",
    "derived",
    "expert_tensors",
    "family_manifest",
    "fused_gate_up",
    "fused_qkv",
    "group_keys",
    "latent_keys",
    "latent_tensors",
    "layer_types",
    "mlp_bias",
    "needs_latent_attention",
    "normalized_topk",
    "optional_window",
    "router_keys",
    "scaling_factors",
    "shared_expert_tensors",
    "sliding_window",
]
