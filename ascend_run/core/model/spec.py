"""The layer's ModuleSpec: Megatron's layer, with our modules where the hooks reach in."""

from __future__ import annotations

from typing import Any

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

from .assembly import Assembly
from .attention import CoreAttention, SelfAttention
from .experts import Experts
from .latent_attention import latent_attention_spec
from .norm import Norm
from .places import EmptyLayer
from .router import Router


class SwiGLU(nn.Module):
    """The platform's fused SwiGLU at Megatron's activation seam: [..., 2F] -> [..., F]."""

    def __init__(self, config: TransformerConfig, *, assembly: Assembly) -> None:
        super().__init__()
        self.function = assembly.ops.swiglu

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save; Megatron's MLP asks each of its parts."""
        return {}


def norm_spec(assembly: Assembly) -> ModuleSpec | type[nn.Module]:
    """The plugin's normalisation, or ours."""
    return assembly.norm or ModuleSpec(module=Norm, params={"assembly": assembly})


def mlp_submodules(config: TransformerConfig, assembly: Assembly) -> MLPSubmodules:
    """Megatron's linears; a fused activation enters where Transformer Engine's would."""
    fused = ModuleSpec(module=SwiGLU, params={"assembly": assembly})
    return MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        linear_fc2=RowParallelLinear,
        activation_func=fused if config.use_te_activation_func else None,
    )


def moe_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Megatron's MoELayer around our router and experts; shared experts are Megatron's own."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=assembly.router or Router,
            experts=ModuleSpec(module=Experts, params={"assembly": assembly}),
            shared_experts=ModuleSpec(
                module=SharedExpertMLP, submodules=mlp_submodules(config, assembly)
            ),
        ),
    )


def attention_spec(config: TransformerConfig, assembly: Assembly) -> ModuleSpec:
    """Of queries, keys and values, or of latents that these are made from."""
    norm = norm_spec(assembly)
    if config.multi_latent_attention:
        return latent_attention_spec(config, assembly, norm)
    per_head_norm = norm if config.qk_layernorm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "assembly": assembly},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=CoreAttention, params={"assembly": assembly}),
            linear_proj=RowParallelLinear,
            q_layernorm=per_head_norm,
            k_layernorm=per_head_norm,
        ),
    )


def layer_spec(config: TransformerConfig, assembly: Assembly, *, moe: bool) -> ModuleSpec:
    """One transformer layer, dense or with experts."""
    norm = norm_spec(assembly)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention_spec(config, assembly),
            self_attn_bda=get_bias_dropout_add,
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
            mlp_bda=get_bias_dropout_add,
        ),
    )


def moe_layers(config: TransformerConfig) -> list[bool]:
    """For each place of the whole model, whether a layer there has experts (``moe_layer_freq``)."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def block_spec(
    config: TransformerConfig, assembly: Assembly, layers: range
) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk."""
    moe = moe_layers(config)
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(module=EmptyLayer)
            if assembly.layer_numbers[index] is None
            else layer_spec(config, assembly, moe=moe[index])
            for index in layers
        ],
        layer_norm=norm_spec(assembly),
    )
