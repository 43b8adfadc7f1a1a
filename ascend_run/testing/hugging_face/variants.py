"""Tiny config.json files of a family, with options away from their defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import ModelFamily
from ascend_run.plugin_api.contracts import ConfigKey

VOCABULARY: Final = 53
"""Odd, so that padding is noticed."""
_OF_ANY: Final[Mapping[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
"""Token ids within the vocabulary; a padding token's row would get no gradient."""
_SIZES: Final[Mapping[str, Any]] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 44,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "kv_channels": 12,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 20,
    "moe_aux_loss_coeff": 0.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "init_method_std": 0.2,
    "layernorm_epsilon": 1e-2,
    "rotary_base": 500.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""Field of ``[model]`` -> value, of keys whose value is copied. The head width is not the hidden
size over the heads; weights are large enough that logits are."""
_GROUPS: Final[Mapping[str, Any]] = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
_FORMED: Final[Mapping[str, Any]] = {
    "doubled": 88,
    "dense_layers_first": 1,
    "expert_widths": 1,
    "head_width": 12,
}
"""Form of a key -> value, of keys that are sizes."""
_GROUPS_FIELD: Final = "model.num_query_groups"
_MOVED: Final[Mapping[str, Any]] = {
    "num_query_groups": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "rotary_local_base": 30.0,
    "rotary_percent": 0.5,
}
_MOVED_FORMS: Final[Mapping[str, Any]] = {
    "window": 5,
    "window_or_0": 5,
    "window_from": 1,
    "window_below": 1,
    "inverse_square_root": 20,
    "softmax_scale": 0.3,
    "over_depth": 0.5,
    "base_width": 24,
    "rope_ratio": 0.05,
    "reciprocal": 2.5,
}
_LINEAR: Final = {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0}


def sizes(family: ModelFamily) -> dict[str, Any]:
    """Return the keys of config.json that make a family's model tiny."""
    found: dict[str, Any] = {}
    of_field = dict(_SIZES)
    if family.defaults.get("model.multi_latent_attention"):
        of_field["num_query_groups"] = of_field["num_attention_heads"]
    for key in family.keys:
        field = key.field.removeprefix("model.")
        form = _form(key)
        if form == "copy" and field in of_field:
            found.setdefault(key.hf, of_field[field])
        elif form in ("copy", "groups") and field in _GROUPS and key.default is not None:
            found.setdefault(key.hf, _GROUPS[field])
        elif form in _FORMED:
            found.setdefault(key.hf, _FORMED[form])
    return {**_OF_ANY, **found}


def options(family: ModelFamily) -> Iterator[dict[str, Any]]:
    """Yield one change of config.json for each option, to a value other than its default."""
    small = sizes(family)
    latent = family.defaults.get("model.multi_latent_attention")
    for key in family.keys:
        value = attrs.NOTHING if latent and key.field == _GROUPS_FIELD else _moved(key)
        if value is not attrs.NOTHING and value != small.get(key.hf, key.default):
            yield {key.hf: value}
    if any(key.field == "model.rotary_base" for key in family.keys):
        yield {"rope_parameters": _LINEAR}


def _form(key: ConfigKey) -> str:
    return key.form.name if key.form else "copy"


def _moved(key: ConfigKey) -> Any:
    field = key.field.removeprefix("model.")
    if (form := _form(key)) in _MOVED_FORMS:
        return _MOVED_FORMS[form]
    if field in _MOVED and form == "copy" and _MOVED[field] != key.default:
        return _MOVED[field]
    if isinstance(key.default, bool):
        return not key.default
    if field in _SIZES or form != "copy":
        return attrs.NOTHING
    if isinstance(key.default, float):
        return 0.75 * key.default if key.default else 0.5
    return attrs.NOTHING


def with_accepted(
    values: Mapping[str, Any],
    changes: Iterator[Mapping[str, Any]],
    is_accepted: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any]:
    """Return the values with all changes; if these are not accepted together, with each one that is
    accepted beside those before."""
    every = [*changes]
    found = {key: value for change in ({**values}, *every) for key, value in change.items()}
    if is_accepted(found):
        return found
    found = dict(values)
    for change in every:
        if is_accepted({**found, **change}):
            found.update(change)
    return found
