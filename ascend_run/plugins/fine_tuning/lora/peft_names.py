"""Parts of linears, by their names in Hugging Face's models. No torch.

A plugin sees no tables of families, so they are repeated here; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OUTPUTS: Final[Mapping[str, str]] = {
    "linear_proj": "self_attn.o_proj",
    "linear_fc2": "mlp.down_proj",
}
_AFTER_HEADS: Final[Mapping[str, str]] = {
    "linear_proj": "self_attn.o_proj",
    "linear_fc1_gate": "mlp.gate_proj",
    "linear_fc1_up": "mlp.up_proj",
    "linear_fc2": "mlp.down_proj",
}
_HEADS: Final[Mapping[str, str]] = {
    "linear_q": "self_attn.q_proj",
    "linear_k": "self_attn.k_proj",
    "linear_v": "self_attn.v_proj",
}
_LLAMA: Final[Mapping[str, str]] = {**_HEADS, **_AFTER_HEADS}
_GLM: Final[Mapping[str, str]] = {**_HEADS, **_OUTPUTS}
_LATENT: Final[Mapping[str, str]] = {
    "linear_q_proj": "self_attn.q_proj",
    "linear_q_down_proj": "self_attn.q_a_proj",
    "linear_q_up_proj": "self_attn.q_b_proj",
    "linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "linear_kv_up_proj": "self_attn.kv_b_proj",
    **_AFTER_HEADS,
}


def _shared(block: str) -> Mapping[str, str]:
    """Return the names of the linears of shared experts, by that of their MLP."""
    return {
        "shared_experts_fc1_gate": f"{block}.gate_proj",
        "shared_experts_fc1_up": f"{block}.up_proj",
        "shared_experts_fc2": f"{block}.down_proj",
    }


_DEEPSEEK: Final[Mapping[str, str]] = {**_LATENT, **_shared("mlp.shared_experts")}
_LIKE_LLAMA: Final = (
    *("llama", "mixtral", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "granite"),
    *("aquila", "internlm", "internlm3", "minicpm"),
)
PEFT_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
    "qwen2_moe": {**_LLAMA, **_shared("mlp.shared_expert")},
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3"), _DEEPSEEK),
    "minicpm3": _LATENT,
    # Gate and up are one linear in their files; and so are queries, keys and values of the last.
    **dict.fromkeys(("glm", "glm4"), _GLM),
    "phi3": _OUTPUTS,
}
"""Model family -> part -> module in a layer of Hugging Face's model. A part that is left out is no
linear of its own there."""
