"""Compare the settings of two stored models: every field of ``[model]``, as it is resolved.

A file that Megatron reads says them twice: in its args, and in the ``config.toml`` beside it, which
only we read. Both are compared with the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.plugin_api.layer_window import layer_window
from ascend_run.tools.convert.formats.megatron_args import make_args
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.formats.shard_layout import LayoutOptions
from ascend_run.tools.convert.model_config import ModelConfig, config_of_args
from ascend_run.types.config import RunConfig

_ARGS: Final = "args: "
_WITHOUT_OPTION: Final = frozenset({"activation"})
"""Megatron's command line has no gated GELU: args with ``swiglu`` say SiLU."""

_GROUPS: Final = ("moe_router_num_groups", "moe_router_group_topk")
"""Of all groups of experts, a token selects as if there were none."""
_BIASES: Final = {
    "add_bias_linear": None,  # the default of the others
    "add_qkv_bias": "qkv",
    "add_linear_proj_bias": "proj",
    "add_mlp_bias": "mlp",
    "add_router_bias": "router",
    "add_expert_bias": "experts",
}
"""Option -> the linears whose bias it adds."""


@attrs.frozen(kw_only=True)
class Settings:
    """The result."""

    compared: int
    """Fields of ``[model]``."""
    different: Mapping[str, str]
    """Field -> its two values."""
    not_stated: Mapping[str, str]
    """Field that the target's format does not have, and whose default there is another value."""

    @property
    def of_args(self) -> list[str]:
        """The fields whose value in the target's args is another."""
        return [name for name in (*self.different, *self.not_stated) if name.startswith(_ARGS)]


def compare_settings(source: ModelSource, target: ModelSource, *, of_run: bool) -> Settings:
    """Compare what two models resolve to.

    Args:
        of_run: The target has a run's config.toml, which states every field.
    """
    different: dict[str, str] = {}
    not_stated: dict[str, str] = {}
    for name, text in unequal(source.config, target.config):
        (different if of_run or name in target.stated else not_stated)[f"model.{name}"] = text
    if target.args:
        for name, (text, is_lacking) in _of_args(source, target).items():
            (not_stated if is_lacking else different)[f"{_ARGS}{name}"] = text
    return Settings(compared=len(source.config.model), different=different, not_stated=not_stated)


def _of_args(source: ModelSource, target: ModelSource) -> dict[str, tuple[str, bool]]:
    """Map each setting that differs in the target's args to how, and whether no args can say it."""
    args = make_args(source.config, LayoutOptions(), padded_rows=source.config.model.vocab_size)
    try:
        described = _read(vars(args), source)
    except AscendRunError as problem:
        return {"all": ("; ".join(problem.problems or (problem.headline,)), True)}
    try:
        found = _read(target.args, target)
    except AscendRunError as problem:
        return {"all": ("; ".join(problem.problems or (problem.headline,)), False)}
    lacking = dict(unequal(source.config, described.config))
    without_option = (set(source.config.model) - described.stated) | _WITHOUT_OPTION
    return {
        f"model.{name}": (text, lacking.get(name) == text and name in without_option)
        for name, text in unequal(source.config, found.config)
    }


def _read(args: Mapping[str, Any], model: ModelSource) -> ModelConfig:
    return config_of_args(model.family_name, args, str(model.folder))


def unequal(source: RunConfig, target: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, both values) of the fields whose effect differs."""
    for name in source.model:
        one, other = _effect(source, name), _effect(target, name)
        if one != other:
            yield name, f"{show(one)} and {show(other)}"


def _effect(config: RunConfig, name: str) -> Any:
    """Return a field's value, the same for each way to say it."""
    if name == "moe_layer_freq":
        return sorted(moe_layers(config.model))
    if name == "window_attn_skip_freq":
        return [layer_window(config.model, layer) for layer in range(config.model.num_layers)]
    if name in _BIASES:
        return _bias_effect(config, _BIASES[name])
    if name in _GROUPS:
        groups = tuple(config.model[field] for field in _GROUPS)
        return groups if all(groups) and groups[0] > groups[1] else None
    value = model_value(config, name)
    if name == "moe_router_topk_scaling_factor":
        return value or 1.0
    return [*value] if isinstance(value, tuple) else value


def _bias_effect(config: RunConfig, linears: str | None) -> bool:
    """Return whether a layer of the model has this bias."""
    model = config.model
    if linears in ("router", "experts") and not model.num_moe_experts:
        return False
    if linears == "mlp" and len(moe_layers(model)) == model.num_layers:
        return False
    return linears is not None and bool(getattr(linear_biases(model), linears))
