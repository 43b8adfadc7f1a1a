"""Stretched positions of multi-latent attention: Hugging Face's yarn and Megatron's. Torch-free.

Megatron has fields of its own for them, and one formula; Hugging Face has two: where both
magnitudes are given, and where ``mscale_all_dim`` is missing or 0, which ignores ``mscale``.
"""

from __future__ import annotations

from typing import Any, Final

from ascend_run.core.config.rotary_keys import PREFIX
from ascend_run.plugin_api.config import RunConfig

_NAMES: Final = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Hugging Face's name -> Megatron's."""
_NEEDED: Final = ("factor", "original_max_position_embeddings")


def latent_rope(values: dict[str, Any]) -> list[str]:
    """Replace the ``model.rope_scaling_...`` of a config.json by Megatron's fields, in place.

    Returns:
        What Megatron's formula has not.
    """
    found = {
        name.removeprefix(f"model.{PREFIX}"): values.pop(name)
        for name in list(values)
        if name.startswith(f"model.{PREFIX}")
    }
    values["model.rope_type"] = "rope"
    if not found:
        return []
    if (kind := found.pop("type")) != "yarn":
        return [f"rope_type is {kind!r}; with latent attention only 'default' and 'yarn' are known"]
    problems = [f"{name} is missing; yarn positions need it" for name in _NEEDED - found.keys()]
    if found.pop("truncate", True) is False:
        problems.append("truncate is false; latent attention rounds yarn's borders to whole pairs")
    if "attention_factor" in found:
        problems.append("attention_factor is not known here; give mscale and mscale_all_dim")
    if "mscale_all_dim" not in found:
        found["mscale"] = 1.0
    elif "mscale" not in found:
        problems.append("mscale is missing beside mscale_all_dim")
    if not problems:
        values["model.rope_type"] = "yarn"
        values |= {f"model.{_NAMES[name]}": value for name, value in found.items()}
    return problems


def latent_rope_problems(config: RunConfig) -> list[str]:
    """What Hugging Face's formula has not."""
    model = config.model
    if not model.get("multi_latent_attention") or model.rope_type != "yarn":
        return []
    if not model.mscale_all_dim and model.mscale != 1.0:
        return [
            f"model.mscale is {model.mscale}; without model.mscale_all_dim transformers takes 1.0"
        ]
    if model.mscale_all_dim and not model.mscale:
        return [f"model.mscale is {model.mscale}; transformers takes 0 for a missing one"]
    return []


def latent_parameters(config: RunConfig) -> dict[str, Any]:
    """Hugging Face's parameters of the yarn, by its names; none where nothing is stretched."""
    model = config.model
    if not model.get("multi_latent_attention") or model.rope_type != "yarn":
        return {}
    written = {theirs: model[ours] for theirs, ours in _NAMES.items()}
    if not model.mscale_all_dim:
        del written["mscale"], written["mscale_all_dim"]
    return written
