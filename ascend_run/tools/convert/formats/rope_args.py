"""Scaling of rotary positions on Megatron's and MindSpeed's command lines. Torch-free.

Megatron has ``--use-rope-scaling`` (that of Llama 3, with three fixed numbers), an interpolation
factor, and yarn for multi-latent attention. MindSpeed has ``--rope-scaling-type`` for all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.config.rotary_keys import PARAMETERS, PREFIX, REQUIRED
from ascend_run.plugin_api.error_text import show
from ascend_run.types.config import RunConfig

_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Fixed in Megatron. Source: megatron-core 0.16, ``RotaryEmbedding._apply_scaling``."""
_DEFAULT_FACTOR: Final = 8.0
_LATENT: Final = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Parameter of yarn -> field of Megatron's MLATransformerConfig."""


def rope_values(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of ``[model]``, and the options that they cannot represent."""
    latent = bool(args.get("multi_latent_attention"))
    if latent and args.get("rope_scaling_type") in (None, "yarn"):
        return _latent_values(args)
    found: list[dict[str, Any]] = []
    if args.get("use_rope_scaling") and not latent:
        factor = args.get("rope_scaling_factor", _DEFAULT_FACTOR)
        found.append({"type": "llama3", "factor": factor, **_LLAMA3})
    factor = None if latent else args.get("rotary_seq_len_interpolation_factor")
    if factor not in (None, 1):
        found.append({"type": "linear", "factor": float(factor)})
    problems = [
        f"{name} is {show(args[name])}: the numbers of its yarn are not in the args"
        for name, value in (("enable_gpt_oss", True), ("position_embedding_type", "yarn"))
        if args.get(name) == value
    ]
    if (kind := args.get("rope_scaling_type")) is not None:
        if kind in PARAMETERS:
            found.append({"type": kind, **_parameters(kind, args, problems)})
        else:
            problems.append(f"rope_scaling_type is {show(kind)}")
    if len(found) > 1:
        kinds = ", ".join(one["type"] for one in found)
        problems.append(f"rotary positions are scaled in more than one way: {kinds}")
    values = {f"{PREFIX}{name}": value for name, value in (found[0] if found else {}).items()}
    return ({"rope_type": "rope", **values} if latent else values), problems


def rope_args(config: RunConfig) -> dict[str, object]:
    """Return the options for a model, those of Megatron where it has the scaling."""
    model = config.model
    plain: dict[str, object] = {"use_rope_scaling": False}
    if model.multi_latent_attention:
        yarn = _LATENT.values() if model.rope_type == "yarn" else ()
        plain |= {name: model[name] for name in ("rope_type", *yarn)}
    kind = model.rope_scaling_type
    if kind is None:
        return plain
    given = {name: model[f"{PREFIX}{name}"] for name in PARAMETERS[kind]}
    of_megatron = kind == "llama3" and not model.multi_latent_attention
    if of_megatron and all(given[name] == value for name, value in _LLAMA3.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": given["factor"]}
    return {
        **plain,
        "rope_scaling_type": kind,
        **{
            f"{PREFIX}{name}": list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
        },
    }


def _parameters(kind: str, args: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the parameters of a scaling, whose names MindSpeed prefixes in part."""
    found = {
        name: value
        for name in PARAMETERS[kind]
        if (value := args.get(f"{PREFIX}{name}", args.get(name))) is not None
    }
    if kind == "yarn" and not found.get("mscale_all_dim"):  # MindSpeed's default: 1.0 and 0.0
        found.pop("mscale_all_dim", None)
        if (mscale := found.pop("mscale", 1.0)) != 1.0:
            problems.append(f"rope_scaling_mscale is {show(mscale)} without that of all dimensions")
    problems += [
        f"rope_scaling_type is {show(kind)} without {name}"
        for name in REQUIRED[kind]
        if name not in found
    ]
    problems += [
        f"{name} is {show(value)}, not a list of numbers"
        for name, value in found.items()
        if name in ("short_factor", "long_factor") and not isinstance(value, list)
    ]
    if (length := found.get("original_max_position_embeddings")) is not None:
        found["original_max_position_embeddings"] = int(length)  # a float in MindSpeed
    return found


def _latent_values(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return Megatron's fields; only MindSpeed's command line has ``rope_scaling_type``."""
    if "rope_scaling_type" not in args:
        rope_type = args.get("rope_type") or "yarn"  # as MLATransformerConfig has it
        names = _LATENT.values() if rope_type == "yarn" else ()
        given = {name: args[name] for name in names if args.get(name) is not None}
        return {"rope_type": rope_type, **given}, []
    if args["rope_scaling_type"] is None:
        return {"rope_type": "rope"}, []
    found = {
        field: value
        for name, field in _LATENT.items()
        if (value := args.get(f"{PREFIX}{name}", args.get(name))) is not None
    }
    missing = [
        f"rope_scaling_type is 'yarn' without {PREFIX}{name}"
        for name in ("factor", "original_max_position_embeddings")
        if _LATENT[name] not in found
    ]
    return {"rope_type": "yarn", **found}, missing
