"""Names of parameters in Megatron's files, and ours.

Ours are those of Megatron's GPTModel with its local modules. Transformer Engine moves a norm into
the linear that follows it. Models of ``megatron.legacy`` have other names and nest them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import OUTPUT_LAYER


class Names(StrEnum):
    """Which modules the names are of."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    LEGACY = "legacy"


_FUSED_NORMS: Final = (
    ("input_layernorm", "self_attention.linear_qkv.layer_norm"),
    ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj.layer_norm"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj.layer_norm"),
)
_LEGACY: Final = (
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    ("input_layernorm", "input_norm"),
    ("pre_mlp_layernorm", "post_attention_norm"),
    ("input_layernorm", "input_layernorm"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
    ("self_attention.linear_qkv", "attention.query_key_value"),
    ("self_attention.linear_proj", "attention.dense"),
)
"""Of two names for one module, the first is written; older releases have the second."""
_FORMER: Final = (
    ("self_attention.linear_q_up_proj", "self_attention.linear_qb"),
    ("self_attention.linear_kv_up_proj", "self_attention.linear_kvb"),
)
"""Multi-latent attention in MindSpeed's earlier releases; only read."""
_LEGACY_EXPERT: Final = re.compile(
    r"mlp\.(?:local_)?experts\.(\d+)\.dense_(h_to_4h|4h_to_h)\.(\w+)"
)
"""Source: ``SwitchMLP`` of ``megatron.legacy``; its first releases have ``experts``."""
_EXPERT: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.(\w+)")
_LEGACY_LINEARS: Final = {"fc1": "h_to_4h", "fc2": "4h_to_h"}
_LEGACY_OUTSIDE: Final = (
    ("embedding.", "language_model.embedding."),
    ("decoder.final_layernorm.", "language_model.encoder.final_norm."),
    ("decoder.final_layernorm.", "language_model.encoder.final_layernorm."),
    ("decoder.", "language_model.encoder."),
    ("decoder.", "language_model.transformer."),
    ("output_layer.", "language_model.output_layer."),
    ("output_layer.", "word_embeddings_for_head."),
)
_SKIPPED: Final = re.compile(
    r".*(\._extra_state|rotary_(pos_)?emb\.inv_freq|\.inv_freq)|_extra_state"
)
_LAYER: Final = re.compile(r"(.*\.layers\.\d+\.)(.+)")


def flat(state: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state dict, nested or not, by dotted name.

    Buffers that Megatron recomputes and the states of Transformer Engine are left out.
    """
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif isinstance(value, Tensor) and not _SKIPPED.fullmatch(name):
            found[name] = value
    return found


def is_legacy(names: Mapping[str, Any]) -> bool:
    """Return whether dotted names are those of ``megatron.legacy``."""
    return any(name.startswith(("language_model.", "word_embeddings_for_head.")) for name in names)


def ours(name: str) -> str:
    """Return our name of a parameter; a name that is not known is returned as it is."""
    for mine, theirs in _LEGACY_OUTSIDE:
        if name.startswith(theirs):
            name = mine + name.removeprefix(theirs)
            break
    if (match := _LAYER.fullmatch(name)) is None:
        return name
    module, _, kind = match[2].rpartition(".")
    for mine, theirs in _FUSED_NORMS:
        if match[2].startswith(f"{theirs}_"):
            return f"{match[1]}{mine}.{match[2].removeprefix(f'{theirs}_')}"
    for mine, theirs in (*_LEGACY, *_FORMER):
        if module == theirs:
            return f"{match[1]}{mine}.{kind}"
    if expert := _LEGACY_EXPERT.fullmatch(match[2]):
        linear = "fc1" if expert[2] == "h_to_4h" else "fc2"
        inner = f"mlp.experts.local_experts.{expert[1]}.linear_{linear}.{expert[3]}"
        return f"{match[1]}{inner}"
    return name


def theirs(name: str, names: Names, *, has_experts: bool, latent: bool) -> str:
    """Return the name of a parameter in a file.

    Args:
        name: Ours.
        has_experts: Whether its layer has experts: their norm stays apart.
        latent: Whether attention is multi-latent: the norm of its input stays apart.
    """
    if names is Names.LOCAL:
        return name
    if names is Names.LEGACY:
        return _as_legacy(name)
    match = _LAYER.fullmatch(name)
    module, _, kind = (match[2] if match else name).rpartition(".")
    apart = {
        "pre_mlp_layernorm": has_experts,
        "input_layernorm": latent,
        "self_attention.q_layernorm": not latent,
    }
    fused = dict(_FUSED_NORMS)
    if match is None or module not in fused or apart.get(module):
        return name
    return f"{match[1]}{fused[module]}_{kind}"


def _as_legacy(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        module, _, kind = match[2].rpartition(".")
        renamed = next((new for old, new in _LEGACY if old == module), module)
        inner = f"{renamed}.{kind}"
        if expert := _EXPERT.fullmatch(match[2]):
            linear = _LEGACY_LINEARS[expert[2]]
            inner = f"mlp.local_experts.{expert[1]}.dense_{linear}.{expert[3]}"
        name = f"{match[1]}{inner}"
    for mine, prefix in _LEGACY_OUTSIDE:
        if name.startswith(mine):
            return prefix + name.removeprefix(mine)
    return name


def nested(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return legacy names as the nested state dict that ``megatron.legacy`` saves.

    Its embedding and output layer are nested module by module, its encoder is flat.
    """
    tree: dict[str, Any] = {}
    for name, tensor in state.items():
        *path, last = name.split(".")
        if path[:2] == ["language_model", "encoder"]:
            path, last = path[:2], name.removeprefix("language_model.encoder.")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = tensor
    return tree


def head_copy(names: Names) -> str:
    """Return the name of the copy of tied embeddings on the last pipeline stage."""
    return "word_embeddings_for_head.weight" if names is Names.LEGACY else OUTPUT_LAYER
