"""Settings of PEFT's ``adapter_config.json`` beside rank, alpha and modules. Torch-free.

Source: https://github.com/huggingface/peft, LoraConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    # Other values change the base too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def changed_settings(config: Mapping[str, Any]) -> dict[str, object]:
    """Map each setting with which an adapter is not ``W + scale * B A`` to a value with which it
    is."""
    return {
        key: neutral[0]
        for key, neutral in _NEUTRAL.items()
        if key in config and config[key] not in neutral
    }
