"""ModuleSpec of a layer: Megatron's layer with our modules at the seams of the hooks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.plugin_api.expert_layers import moe_layers

from .assembly import Assembly
from .attention import CoreAttention, SelfAttention
from .experts import Experts, mlp_activation
from .latent_attention import latent_attention_spec
from .layer_slots import EmptyLayer
from .norm import L2Norm, Norm
from .residual import ResidualAdd, wide_bias_dropout_add
from .router import Router

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig


class Activation(nn.Module):
    """Megatron's activation module: [..., 2F] (gate, then up) -> [..., F]; [..., F] if not gated.

    A module, so that links can be around its forward.
    """

    def __init__(self, config: TransformerConfig, *, assembly: Assembly) -> None:
        super().__init__()
        activation = mlp_activation(config, assembly)
        self.function = activation.fused or activation

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, object]:
        """Return nothing; Megatron's MLP calls this on each of its submodules."""
        return {}


def _linear(kind: type[nn.Module], config: TransformerConfig, bias: bool) -> type[nn.Module]:
    """Return a linear with or without a bias; Megatron has one option for all linears."""
    if bias == config.add_bias_linear:
        return kind

    class Linear(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": bias})

    return Linear


def residual_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Return how a sublayer's output is added to the residual stream."""
    model = assembly.model
    norm = None if model.norm_placement == "pre" else norm_spec(assembly)
    if norm is None and model.residual_multiplier == 1.0:
        add = wide_bias_dropout_add if config.fp32_residual_connection else get_bias_dropout_add
        return cast("ModuleSpec", add)  # Megatron also passes a function
    return ModuleSpec(
        module=ResidualAdd,
        params={"config": config, "norm": norm, "multiplier": model.residual_multiplier},
    )


def norm_spec(assembly: Assembly) -> ModuleSpec | type[nn.Module]:
    """Return the plugin's norm, or the built-in one."""
    return assembly.norm or ModuleSpec(module=Norm, params={"assembly": assembly})


def mlp_submodules(config: TransformerConfig, assembly: Assembly) -> MLPSubmodules:
    """Return Megatron's linears, with our activation between them."""
    bias = linear_biases(assembly.model).mlp
    return MLPSubmodules(
        linear_fc1=_linear(ColumnParallelLinear, config, bias),
        activation_func=ModuleSpec(module=Activation, params={"assembly": assembly}),
        linear_fc2=_linear(RowParallelLinear, config, bias),
    )


def moe_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Return Megatron's MoELayer with our router and experts; shared experts are Megatron's."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=assembly.router
            or partial(
                Router,
                has_bias=linear_biases(assembly.model).router,
                sparsemixer_eps=assembly.model.moe_sparsemixer_eps,
                samples=assembly.model.moe_sparsemixer_sampling,
            ),
            experts=ModuleSpec(module=Experts, params={"assembly": assembly}),
            shared_experts=ModuleSpec(
                module=SharedExpertMLP, submodules=mlp_submodules(config, assembly)
            ),
        ),
    )


def attention_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Return self-attention, or multi-latent attention if the config selects it."""
    norm = norm_spec(assembly)
    if config.multi_latent_attention:
        return latent_attention_spec(cast("MLATransformerConfig", config), assembly, norm)
    per_head_norm = norm if config.qk_layernorm else None
    if config.qk_l2_norm:
        per_head_norm = ModuleSpec(module=L2Norm, params={"assembly": assembly})
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(module=CoreAttention, params={"assembly": assembly}),
        linear_proj=_linear(RowParallelLinear, config, linear_biases(assembly.model).proj),
    )
    if per_head_norm is not None:
        submodules.q_layernorm = submodules.k_layernorm = per_head_norm
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "assembly": assembly},
        submodules=submodules,
    )


def layer_spec(config: TransformerConfig, assembly: Assembly, *, moe: bool) -> ModuleSpec:
    """Return the spec of one transformer layer, dense or MoE."""
    placement = assembly.model.norm_placement
    norm = IdentityOp if placement == "post" else norm_spec(assembly)
    add = residual_spec(config, assembly)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention_spec(config, assembly),
            self_attn_bda=add,
            pre_cross_attn_layernorm=IdentityOp,
            pre_mlp_layernorm=norm,
            mlp=(
                moe_spec(config, assembly)
                if moe
                else ModuleSpec(
                    module=MLP,
                    params={"ffn_hidden_size": config.ffn_hidden_size},
                    submodules=mlp_submodules(config, assembly),
                )
            ),
            mlp_bda=add,
        ),
    )


def block_spec(
    config: TransformerConfig, assembly: Assembly, layers: range
) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline chunk."""
    moe = moe_layers(config)
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(module=EmptyLayer)
            if assembly.layer_numbers[index] is None
            else layer_spec(config, assembly, moe=index in moe)
            for index in layers
        ],
        layer_norm=cast("ModuleSpec", norm_spec(assembly)),  # a class is accepted, too
    )


def last_layer_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Return the spec of the model's last layer that is not an empty slot."""
    last = max(slot for slot, number in enumerate(assembly.layer_numbers) if number is not None)
    return layer_spec(config, assembly, moe=last in moe_layers(config))
