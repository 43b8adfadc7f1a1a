"""Map a parameter's name in the whole model to its key (``part.name``) in the cost model."""

from __future__ import annotations

import re
from typing import Final

_IN_LAYER: Final = re.compile(r"(?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.(.+)")
_MTP: Final = re.compile(r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj|final_layernorm)")
_NORMS: Final = {"input_layernorm": "input_norm", "pre_mlp_layernorm": "mlp_norm"}


def parameter_key(name: str) -> str | None:
    """Return ``mlp.linear_fc1`` for ``decoder.layers.0.mlp.linear_fc1.weight``; None if the plain
    model has no such parameter."""
    owner, _, kind = name.rpartition(".")
    if match := _IN_LAYER.fullmatch(owner):
        return _in_layer(match[1].split("."), kind)
    suffix = _suffix(kind)
    if suffix is None:
        return None
    if match := _MTP.fullmatch(owner):
        return f"mtp.{match[1].replace('layernorm', 'norm')}{suffix}"
    return {
        "embedding.word_embeddings": "embedding.word_embeddings",
        "embedding.position_embeddings": "embedding.position_embeddings",
        "embedding.layernorm": f"embedding.layernorm{suffix}",
        "decoder.final_layernorm": f"final_norm.weight{suffix}",
        "output_layer": f"output_layer.weight{suffix}",
        "score": "output_layer.weight",
    }.get(owner)


def _in_layer(words: list[str], kind: str) -> str | None:
    if words == ["mlp", "experts"]:  # one tensor for the linears of all experts
        return f"experts.{kind}" if kind.removesuffix("_bias") in ("fc1", "fc2") else None
    if words == ["mlp", "shared_experts"] and kind == "gate_weight":
        return "shared_experts.gate_weight"
    if words == ["self_attention", "core_attention"] and kind == "softmax_offset":
        return "self_attention.softmax_offset"
    suffix = _suffix(kind)
    match words:
        case _ if suffix is None:
            return None
        case [norm] if norm in _NORMS:
            return f"{_NORMS[norm]}.weight{suffix}"
        case ["self_attn_bda" | "mlp_bda" as part, "norm"]:
            return f"{part}.weight{suffix}"
        case ["mlp", "router"]:
            return f"router.weight{suffix}"
        case ["self_attention" | "mlp" as part, name]:
            return f"{part}.{name}{suffix}"
        case ["mlp", "shared_experts", name]:
            return f"shared_experts.{name}{suffix}"
    return None


def _suffix(kind: str) -> str | None:
    return {"weight": "", "bias": "_bias"}.get(kind)
