"""Settings of PEFT's ``adapter_config.json``. Torch-free.

Source: https://github.com/huggingface/peft, LoraConfig.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    # Other values change the base too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}

SCORES: Final = "SEQ_CLS"
"""``task_type`` of an adapter of a model with a score head."""
MAGNITUDE: Final = "lora_magnitude_vector"
"""End of the name of DoRA's magnitudes, [out], with ``use_dora``."""


EXPERT_PARAMETERS: Final = ("gate_up_proj", "down_proj")
"""Stacked weights of the experts of one layer, in the order in which PEFT nests their wrappers."""


def expert_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Map the modules in a layer whose adapters are those of experts to the adapted parameters.

    Of several parameters of one module, PEFT wraps each around the one before.
    """
    targets = config.get("target_parameters") or ()
    names = [n for n in EXPERT_PARAMETERS if any(t.rpartition(".")[2] == n for t in targets)]
    ends = [".base_layer" * nested for nested in reversed(range(len(names)))]
    return {f"mlp.experts{end}": name for end, name in zip(ends, names, strict=True)}


def changed_settings(config: Mapping[str, Any]) -> dict[str, object]:
    """Map each setting with which an adapter is not ``W + scale * B A`` to a value with which it
    is."""
    return {
        key: neutral[0]
        for key, neutral in _NEUTRAL.items()
        if key in config and config[key] not in neutral
    }


def is_saved(parameter: str, modules: Collection[str]) -> bool:
    """Return whether a parameter, by its name in our model, is trained in full: whether the module
    that owns it has one of these last names.

    Layers of multi-token prediction stay frozen, as their linears take no adapter.
    """
    return (
        not parameter.startswith("mtp.")
        and parameter.rpartition(".")[0].rpartition(".")[2] in modules
    )


def saved_tensors(names: Iterable[str]) -> dict[str, str]:
    """Map the tensors of modules that were saved in full, by their names in PEFT's file, to their
    names in Hugging Face's model."""
    return {
        name: name.removeprefix("base_model.model.")
        for name in names
        if name.startswith("base_model.model.") and ".lora_" not in name
    }


def untied(embedding: str, output_layer: str) -> str:
    """Return that an adapter trains the two apart, of a model that has one weight for both.

    PEFT does so unless ``ensure_weight_tying`` is set, whichever of them ``modules_to_save`` names.
    """
    return (
        f"{embedding} and {output_layer} were trained apart, and the model has one weight for "
        "both; train with ensure_weight_tying=true, or untie them in the base "
        "(tie_word_embeddings=false)"
    )


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Return the rank of the adapter of a module, by its name in Hugging Face's model."""
    rank: int = _by_pattern(config, "rank_pattern", module, "r")
    return rank


def alpha_of(config: Mapping[str, Any], module: str) -> float:
    """Return the alpha of the adapter of a module, by its name in Hugging Face's model."""
    alpha: float = _by_pattern(config, "alpha_pattern", module, "lora_alpha")
    return alpha


def size_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why ``r`` and ``lora_alpha`` are no rank and no alpha, and ``target_parameters`` no
    names."""
    if type(rank := config.get("r")) is not int or rank < 1:
        yield f"r is {rank!r}, expected a rank of at least 1"
    alpha = config.get("lora_alpha")
    if type(alpha) not in (int, float) or not math.isfinite(alpha or 0):
        yield f"lora_alpha is {alpha!r}, expected a number"
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"target_parameters is {names!r}, expected a list of names"


def pattern_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why ``rank_pattern`` and ``alpha_pattern`` give no ranks and no scales."""
    for name, kind, wanted in (
        ("rank_pattern", int, "a rank of at least 1"),
        ("alpha_pattern", int | float, "a number above 0"),
    ):
        pattern = config.get(name) or {}
        if not isinstance(pattern, Mapping):
            yield f"{name} is {pattern!r}, expected a table of modules"
            continue
        for key, value in pattern.items():
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                yield f"{name} has {key!r}: {value!r}, expected {wanted}"
            try:
                _expression(key)
            except re.error as error:
                yield f"{name} has {key!r}, which is no regular expression: {error}"


def _by_pattern(config: Mapping[str, Any], name: str, module: str, default: str) -> Any:
    """Return the value of the first key that matches, as PEFT does."""
    for key, value in (config.get(name) or {}).items():
        if _expression(key).match(module):
            return value
    return config[default]


def _expression(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")
