"""Convert yarn of multi-latent attention between Hugging Face and Megatron. Torch-free.

Megatron has its own fields and one formula. Hugging Face has two formulas: one if both magnitudes
are given, and one that ignores ``mscale`` if ``mscale_all_dim`` is missing or 0.
"""

from __future__ import annotations

from typing import Any, Final

from ascend_run.core.config.rotary_keys import PREFIX
from ascend_run.types.config import RunConfig

_NAMES: Final = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Maps Hugging Face's names to Megatron's."""
LATENT_FIELDS: Final = frozenset(f"model.{name}" for name in ("rope_type", *_NAMES.values()))
_NEEDED: Final = ("factor", "original_max_position_embeddings")


def latent_rope(values: dict[str, Any]) -> list[str]:
    """Replace yarn's ``model.rope_scaling_...`` of a config.json by Megatron's fields, in place.

    Returns:
        What Megatron's formula cannot represent.
    """
    values["model.rope_type"] = "rope"
    if values.get(f"model.{PREFIX}type") != "yarn":
        return []
    found = {
        name.removeprefix(f"model.{PREFIX}"): values.pop(name)
        for name in list(values)
        if name.startswith(f"model.{PREFIX}")
    }
    del found["type"]
    problems = [f"{name} is missing; yarn positions need it" for name in _NEEDED - found.keys()]
    if found.pop("truncate", True) is False:
        problems.append(
            "truncate is false; multi-latent attention rounds yarn's boundaries to integer pairs"
        )
    if "attention_factor" in found:
        problems.append("attention_factor is not supported here; give mscale and mscale_all_dim")
    if "mscale_all_dim" not in found:
        found["mscale"] = 1.0
    elif "mscale" not in found:
        problems.append("mscale is missing beside mscale_all_dim")
    if not problems:
        values["model.rope_type"] = "yarn"
        values |= {f"model.{_NAMES[name]}": value for name, value in found.items()}
    return problems


def latent_rope_problems(config: RunConfig) -> list[str]:
    """Return what Hugging Face's formula cannot represent."""
    model = config.model
    if not model.multi_latent_attention or model.rope_type != "yarn":
        return []
    if not model.mscale_all_dim and model.mscale != 1.0:
        return [
            f"model.mscale is {model.mscale}; without model.mscale_all_dim transformers takes 1.0"
        ]
    if model.mscale_all_dim and not model.mscale:
        return [f"model.mscale is {model.mscale}; transformers takes 0 for a missing one"]
    return []


def latent_parameters(config: RunConfig) -> dict[str, object]:
    """Return the yarn parameters by Hugging Face's names; empty without yarn."""
    model = config.model
    if not model.multi_latent_attention or model.rope_type != "yarn":
        return {}
    written = {theirs: model[ours] for theirs, ours in _NAMES.items()}
    if not model.mscale_all_dim:
        del written["mscale"], written["mscale_all_dim"]
    return written
