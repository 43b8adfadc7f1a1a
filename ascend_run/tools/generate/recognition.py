"""Recognise what a layer of modules computes; imports Megatron.

A layer is recognised by the types of its modules, the links and hooks on them, and the fields of
its config. Whatever is unknown stays with the modules. So is multi-latent attention, but for the
fields, since its own modules are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_run.core.model.attention import CoreAttention, SelfAttention
from ascend_run.core.model.latent_attention import LatentAttention
from ascend_run.core.model.norm import L2Norm, Norm
from ascend_run.core.model.replicated_groups import own_heads
from ascend_run.core.model.residual import ResidualAdd
from ascend_run.core.model.spec import Activation
from ascend_run.ops.generation.cached_attention import CachedAttention
from ascend_run.ops.generation.latent_attention import CachedLatents
from ascend_run.ops.generation.lean_layer import (
    LeanAttention,
    LeanLayer,
    LeanLinear,
    LeanMlp,
    LeanNorm,
    LeanResidual,
    OfRows,
    StepAngles,
    swiglu,
)
from ascend_run.ops.linear.packed_linear import PackedWeight
from ascend_run.ops.linear.stored_weight import stored_weight
from ascend_run.types.attention import AttentionSpec
from ascend_run.types.forward import chain_of

Packed = Mapping[nn.Module, PackedWeight]
"""Linear -> its packed weight."""

_OWN_LINKS: Final = frozenset({"generation", "platform"})
"""Links that compute the same as a module without them."""

_KNOWN = """
    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias attention_dropout
    attention_softmax_in_fp32 autocast_dtype bf16 bias_activation_fusion bias_dropout_fusion
    calculate_per_token_loss cuda_graph_scope embedding_init_method embedding_init_method_std
    expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size fp16 gated_linear_unit
    glu_linear_offset hidden_dropout hidden_size init_method init_method_std kv_channels
    layernorm_epsilon layernorm_zero_centered_gamma masked_softmax_fusion
    microbatch_group_size_per_vp_stage normalization num_attention_heads num_layers num_query_groups
    output_layer_init_method params_dtype pipeline_dtype pipeline_model_parallel_size qk_l2_norm
    qk_layernorm recompute_modules rotary_interleaved softmax_scale softmax_type
    tensor_model_parallel_size use_te_activation_func variable_seq_lengths window_attn_skip_freq
    window_size
"""
KNOWN_FIELDS: Final = frozenset(_KNOWN.split())
"""Fields of Megatron's config that a lean layer follows, or that change nothing of a layer's
forward. A layer with any other one off its default is not recognised."""


def lean_layer(layer: nn.Module, packed: Packed, angles: StepAngles) -> LeanLayer | None:
    """Return what computes a step of a layer; None if it is not recognised.

    Its MLP may be anything that maps each token, such as experts; it is then called as it is.

    Args:
        angles: Of all layers of the model.
    """
    if type(layer) is not TransformerLayer or any(_unknown(layer)):
        return None
    attention = _attention(layer.self_attention, packed, angles)
    norms = [_norm(norm) for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)]
    residuals = [_residual(add) for add in (layer.self_attn_bda, layer.mlp_bda)]
    if attention is None or None in norms or None in residuals:
        return None
    (attention_norm, mlp_norm), (attention_add, mlp_add) = norms, residuals
    assert attention_norm is not None
    assert mlp_norm is not None
    assert attention_add is not None
    assert mlp_add is not None
    mlp = _mlp(layer.mlp, packed)
    return LeanLayer(
        attention_norm=attention_norm.of_rows,
        attention=attention,
        attention_residual=attention_add,
        mlp_norm=mlp_norm.of_rows,
        mlp=_called(layer.mlp) if mlp is None else mlp,
        mlp_residual=mlp_add,
    )


def _unknown(layer: Any) -> Iterator[str]:
    """Yield what a lean layer would leave out."""
    config = layer.config
    kind = type(config)
    for field in dataclasses.fields(kind):
        if field.name in KNOWN_FIELDS or _only_of_experts(field.name):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(config, field.name) != default:
            yield field.name
    if kind is not TransformerConfig or layer.training:
        yield "its kind"
    others = (layer.cross_attention, layer.pre_cross_attn_layernorm)
    if not all(type(other) is IdentityOp for other in others):
        yield "cross attention"
    if type(layer.cross_attn_bda) is not IdentityFuncOp:
        yield "cross attention"
    inside = [*layer.self_attention.modules(), *_norms_of(layer)]
    if type(layer.mlp) is MLP:
        inside += layer.mlp.modules()
    yield from _foreign((layer, *inside))


def _foreign(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield what others have put around forwards."""
    for module in modules:
        yield from set(chain_of(module).names) - _OWN_LINKS
        if module._forward_hooks or module._forward_pre_hooks:
            yield "hooks"


def _only_of_experts(field: str) -> bool:
    """Return whether a field concerns experts, whose module is called as it is."""
    return field.startswith("moe_") or field in ("num_moe_experts",)


def _norms_of(layer: Any) -> Iterator[nn.Module]:
    for part in (layer.input_layernorm, layer.pre_mlp_layernorm, layer.self_attn_bda):
        if isinstance(part, nn.Module):
            yield from part.modules()
    if isinstance(layer.mlp_bda, nn.Module):
        yield from layer.mlp_bda.modules()


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A recognised norm; ``of_rows`` is None where there is none."""

    of_rows: OfRows | None


def _norm(module: Any) -> _Norm | None:
    if module is None or type(module) is IdentityOp:
        return _Norm(None)
    if type(module) is L2Norm:
        return _Norm(LeanNorm(weight_H=module.ones, bias_H=None, centers=False, eps=module.eps))
    if type(module) is not Norm:
        return None
    weight_H: Tensor = module.weight
    if module.zero_centered:
        weight_H = weight_H + 1
    bias_H = module.bias
    centers = bias_H is not None
    return _Norm(LeanNorm(weight_H=weight_H, bias_H=bias_H, centers=centers, eps=module.eps))


def _residual(add: Any) -> LeanResidual | None:
    if add is get_bias_dropout_add:
        return LeanResidual(norm=None, multiplier=1.0)
    if type(add) is not ResidualAdd or (norm := _norm(add.norm)) is None:
        return None
    return LeanResidual(norm=norm.of_rows, multiplier=add.multiplier)


def _linear(module: Any, packed: Packed) -> LeanLinear | None:
    if (weight := packed.get(module)) is None:
        return None
    group = module.tp_group if isinstance(module, RowParallelLinear) else None
    is_split = group is not None and group.size() > 1
    return LeanLinear(weight, module.bias, group if is_split else None)


def _attention(module: Any, packed: Packed, angles: StepAngles) -> LeanAttention | None:
    core: Any = getattr(module, "core_attention", None)
    if type(module) is not SelfAttention or type(core) is not CoreAttention:
        return None
    qkv, proj = _linear(module.linear_qkv, packed), _linear(module.linear_proj, packed)
    norms = [_norm(norm) for norm in (module.q_layernorm, module.k_layernorm)]
    kernel: Any = core.kernel
    if qkv is None or proj is None or type(kernel) is not CachedAttention or None in norms:
        return None
    q_norm, k_norm = (None if norm is None else norm.of_rows for norm in norms)
    return LeanAttention(
        qkv=_of_own_heads(qkv, module),
        proj=proj,
        kernel=kernel,
        spec=_spec(core),
        num_groups=module.num_query_groups_per_partition,
        width=module.hidden_size_per_attention_head,
        angles=angles,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _of_own_heads(qkv: LeanLinear, module: Any) -> OfRows:
    """Return the projection to this rank's heads, some of which may be another rank's too."""
    if module.config.num_query_groups >= module.world_size:
        return qkv
    return lambda x_TH: own_heads(qkv(x_TH), module.config, module.tp_group)


def _spec(core: CoreAttention) -> AttentionSpec:
    return AttentionSpec(
        scale=core.scale,
        mask=core.mask,
        position_bias=core.position_bias,
        sinks=core.softmax_offset,
        softcap=core.softcap,
    )


def _mlp(module: Any, packed: Packed) -> LeanMlp | None:
    if type(module) is not MLP or type(module.activation_func) is not Activation:
        return None
    fc1, fc2 = _linear(module.linear_fc1, packed), _linear(module.linear_fc2, packed)
    if fc1 is None or fc2 is None:
        return None
    config = module.config
    bounded = config.activation_func_clamp_value is not None or config.glu_linear_offset
    is_swiglu = config.gated_linear_unit and config.activation_func is F.silu and not bounded
    # Half precisions round as the platform's operator does.
    plain = is_swiglu and config.params_dtype in (torch.float32, torch.float64)
    activation = swiglu if plain else module.activation_func.function
    return LeanMlp(fc1=fc1, activation=activation, fc2=fc2)


def _called(module: Any) -> OfRows:
    """Return a call of an MLP or experts."""

    def of_rows(x_TH: Tensor) -> Tensor:
        out_T1H, bias_H = module(x_TH.unsqueeze(1))
        out: Tensor = out_T1H.squeeze(1)
        return out if bias_H is None else out + bias_H

    assert type(module) in (MLP, MoELayer)
    return of_rows


def cached_latents(module: Any, packed: Packed) -> CachedLatents | None:
    """Return what computes steps of multi-latent attention by latents in pages; None if something
    is around what it passes over, or if the attention's kernel reads no pages."""
    core: Any = getattr(module, "core_attention", None)
    if type(module) is not LatentAttention or type(core) is not CoreAttention or module.training:
        return None
    kernel: Any = core.kernel
    up: Any = module.linear_kv_up_proj
    reads_pages = type(kernel) is CachedAttention and kernel.inner.features.cached
    is_plain = type(up) is ColumnParallelLinear and up.bias is None and up in packed
    is_plain = is_plain and stored_weight(up.weight) is None
    if not reads_pages or not is_plain or any(_foreign((up, *core.modules()))):
        return None
    return CachedLatents(
        kernel=kernel,
        up=packed[up],
        up_NXL=up.weight.detach().unflatten(0, (module.num_attention_heads_per_partition, -1)),
        key_width=module.config.qk_head_dim,
        spec=_spec(core),
    )
