"""Model families as data: a base record, derivation of new ones, and the plugin class of a record.

Torch-free. For built-in and third-party families alike.
"""

from .decoder import (
    DECODER,
    attention_bias,
    fused_gate_up,
    fused_qkv,
    layer_types,
    mlp_bias,
    optional_window,
    sliding_window,
)
from .derivation import derived
from .experts import EXPERT_DEFAULTS, SPARSE, expert_tensors, shared_expert_tensors
from .plugin import FamilyPlugin, family_manifest

__all__ = [
    "DECODER",
    "EXPERT_DEFAULTS",
    "SPARSE",
    "FamilyPlugin",
    "attention_bias",
    "derived",
    "expert_tensors",
    "family_manifest",
    "fused_gate_up",
    "fused_qkv",
    "layer_types",
    "mlp_bias",
    "optional_window",
    "shared_expert_tensors",
    "sliding_window",
]
