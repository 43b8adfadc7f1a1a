"""Convert the run's config to Megatron's TransformerConfig."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args, get_origin

import attrs
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import Tensor

from ascend_run.core.config.latent_attention import latent_softmax_scale
from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import ConfigError, HookError
from ascend_run.types.config import RunConfig

PRECISIONS: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@attrs.frozen
class QuickGelu:
    """``x * sigmoid(alpha * x)``. Source: arXiv:1606.08415, section 2."""

    alpha: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.alpha * x)


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": _squared_relu,
}


def _leave_unset(weight: Tensor) -> Tensor:
    """Disable Megatron's initialization; ours does not depend on the layout."""
    return weight


def make_transformer_config(
    config: RunConfig, hooks: Hooks, dtype: torch.dtype, **asked: Any
) -> TransformerConfig:
    """Build Megatron's config with the values our modules need, then apply the configure hooks.

    Args:
        dtype: Dtype of the parameters and of the activations between layers.
        asked: Arguments that every hook of the model build takes besides the config.

    Raises:
        HookError: A plugin modified its arguments in place.
        ConfigError: Megatron rejects the values.
    """
    is_latent = bool(config.model.multi_latent_attention)
    kind = MLATransformerConfig if is_latent else TransformerConfig
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    chosen = {
        name: _as_megatron_has_it(name, value)
        for section in (config.model, config.parallel)
        for name, value in section.items()
        if name in known and value is not None and value != known[name].default
    }
    arguments = {**chosen, **_fixed_arguments(dtype), **_built_in_arguments(config, chosen)}
    arguments = _configured(arguments, config, hooks, asked)
    if arguments.get("fp32_residual_connection"):
        # Pipeline stages send the residual stream. If the run dtype is already as wide, Megatron's
        # option is turned off, since it would narrow float64.
        stream = torch.promote_types(dtype, torch.float32)
        arguments["pipeline_dtype"] = stream
        arguments["fp32_residual_connection"] = stream is not dtype
    try:
        made = kind(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        # Megatron's own checks of field combinations; they name the fields.
        raise ConfigError("Megatron rejects this model", [str(error)]) from error
    # Megatron's seam for an activation module, set late: it admits Transformer Engine's functions.
    made.use_te_activation_func = True
    return made


def _fixed_arguments(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that the runtime sets regardless of the config."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        "bias_activation_fusion": False,
        # Megatron's default value triggers its own deprecation warning.
        "cuda_graph_scope": [],
        # Losses are sums over tokens, divided once by the number of tokens of the step.
        "calculate_per_token_loss": True,
    }


def _built_in_arguments(config: RunConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Megatron fields that the built-in modules need, derived from the config.

    Args:
        chosen: Megatron fields that the config sets.
    """
    model = config.model
    quick_gelu = QuickGelu(model.quick_gelu_alpha)
    activation = {**ACTIVATIONS, "quick_gelu": quick_gelu}[model.activation]
    # Megatron reads 0 as layers that it does not build.
    arguments: dict[str, Any] = {
        "activation_func": activation,
        "mtp_num_layers": model.mtp_num_layers or None,
    }
    if chosen.get("num_moe_experts"):
        # Set even if unset in the config, since Megatron's default differs from ours.
        arguments["moe_token_dispatcher_type"] = model.moe_token_dispatcher_type
        width = chosen.get("moe_ffn_hidden_size", chosen.get("ffn_hidden_size"))
        arguments["moe_ffn_hidden_size"] = width
    if model.multi_latent_attention:
        # None means that queries have no latent; Megatron's default differs.
        arguments["q_lora_rank"] = model.q_lora_rank
        # Megatron's plain attention, a base class here, sizes its submodules by this.
        arguments["kv_channels"] = model.v_head_dim
        arguments["softmax_scale"] = latent_softmax_scale(model)
    return arguments


def _as_megatron_has_it(name: str, value: Any) -> Any:
    """Convert a tuple of the config to a list if Megatron's type is a list."""
    if not isinstance(value, tuple):
        return value
    takes_tuple = any(get_origin(t) is tuple for t in get_args(megatron_fields()[name].type))
    return value if takes_tuple else _as_lists(value)


def _as_lists(value: Any) -> Any:
    return [_as_lists(member) for member in value] if isinstance(value, tuple) else value


def _configured(
    arguments: dict[str, Any], config: RunConfig, hooks: Hooks, asked: Mapping[str, object]
) -> dict[str, Any]:
    """Apply every plugin's ``ascend_configure``, each of which must return new arguments."""
    before = copy.deepcopy(arguments)

    def watch(plugin: str, given: Mapping[str, Any], returned: Mapping[str, object]) -> None:
        nonlocal before
        if given != before:
            raise HookError(
                f"ascend_configure: '{plugin}' changed the arguments that it was given; it must "
                "leave them unchanged and return new ones, as in {**arguments, name: value}"
            )
        before = copy.deepcopy(dict(returned))

    return dict(hooks.wrap("ascend_configure", arguments, watch, config=config, **asked))
