"""From the run's config to Megatron's TransformerConfig."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args, get_origin

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
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.errors import ConfigError, HookError

PRECISIONS: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": _squared_relu,
}


def _leave_unset(weight: Tensor) -> Tensor:
    """Megatron's initialisation, switched off: ours does not depend on the layout."""
    return weight


def make_transformer_config(
    config: RunConfig, hooks: Hooks, dtype: torch.dtype, **asked: Any
) -> TransformerConfig:
    """Megatron's config, with what our modules need of it, after every plugin's ``configure``.

    Args:
        dtype: Of the parameters and of the activations between layers.
        asked: What every hook of the model build is asked with, beside the config.

    Raises:
        HookError: A plugin changed the arguments that it was given to answer others.
        ConfigError: Megatron refuses the values.
    """
    is_latent = bool(config.model.get("multi_latent_attention"))
    kind = MLATransformerConfig if is_latent else TransformerConfig
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    chosen = {
        name: _as_megatron_has_it(name, value)
        for section in (config.model, config.parallel)
        for name, value in section.items()
        if name in known and value is not None and value != known[name].default
    }
    activation = ACTIVATIONS[config.model.activation]
    arguments: dict[str, Any] = {
        **chosen,
        "activation_func": activation,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        "bias_activation_fusion": False,
        # Megatron's default names a scope that it then calls deprecated.
        "cuda_graph_scope": [],
        # Losses are sums over tokens, divided once by the tokens of the whole step.
        "calculate_per_token_loss": True,
    }
    if activation is F.silu and arguments.get("gated_linear_unit"):
        # Megatron's seam for a fused activation, which our SwiGLU enters.
        arguments["use_te_activation_func"] = True
    if arguments.get("num_moe_experts"):
        # Asked for or our own default: Megatron's is another, so a value equal to it counts too.
        arguments["moe_token_dispatcher_type"] = config.model.moe_token_dispatcher_type
        arguments.setdefault("moe_ffn_hidden_size", arguments.get("ffn_hidden_size"))
        if not arguments.get("moe_aux_loss_coeff"):
            arguments["moe_router_load_balancing_type"] = "none"
    if is_latent:
        # None says that queries have no latent, which Megatron's default has.
        arguments["q_lora_rank"] = config.model.q_lora_rank
        # What Megatron's plain attention, which ours is built on, makes its own parts of.
        arguments["kv_channels"] = config.model.v_head_dim
        arguments["softmax_scale"] = latent_softmax_scale(config.model)
    arguments = _configured(arguments, config, hooks, asked)
    try:
        return kind(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        # Its own checks of how fields go together; they name the fields.
        raise ConfigError("Megatron refuses this model", [str(error)]) from error


def _as_megatron_has_it(name: str, value: Any) -> Any:
    """A sequence, which a config keeps as a tuple, as the list that Megatron's type asks for."""
    if not isinstance(value, tuple):
        return value
    takes_tuple = any(get_origin(t) is tuple for t in get_args(megatron_fields()[name].type))
    return value if takes_tuple else list(value)


def _configured(
    arguments: dict[str, Any], config: RunConfig, hooks: Hooks, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments after every plugin's ``ascend_configure``, each of which answers new ones."""
    before = copy.deepcopy(arguments)

    def watch(plugin: str, given: Mapping[str, Any], answered: Mapping[str, Any]) -> None:
        nonlocal before
        if given != before:
            raise HookError(
                f"ascend_configure: '{plugin}' changed the arguments that it was given; it must "
                "leave them alone and answer new ones, as in {**arguments, name: value}"
            )
        before = copy.deepcopy(dict(answered))

    return dict(hooks.wrap("ascend_configure", arguments, watch, config=config, **asked))
