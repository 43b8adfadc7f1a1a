"""Check that the values of a config are consistent, independent of the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from ascend_run.core.config.built_in import built_in_problems
from ascend_run.plugin_api.error_text import around, cannot_split, divisors, one_of, show
from ascend_run.types.config import FieldSection, RunConfig
from ascend_run.types.declarations import Claim

from .latent_attention import latent_problems
from .multi_token import multi_token_problems
from .rotary import rotary_problems

_NOT_RECOMPUTED: Final = {
    "layernorm": "Megatron's recomputation of it needs Transformer Engine, which is not used",
    "mla_up_proj": "attention saves its inputs, whose memory cannot be freed and refilled",
    "moe_act": "the built-in experts cannot discard the output of their activation alone",
}
"""Megatron's modules of selective recomputation that are not supported, with the reason."""


def consistency_problems(config: RunConfig, claimed: Collection[Claim] = ()) -> list[str]:
    """Return a message for each contradiction: the options, their values and what would work.

    Args:
        claimed: Seams that plugins of the run own. For the others the built-in modules are checked,
            which do not support all of Megatron's options.
    """
    return [
        *built_in_problems(config, claimed),
        *([] if config.model.multi_latent_attention else _attention(config)),
        *latent_problems(config),
        *rotary_problems(config),
        *multi_token_problems(config),
        *_experts(config),
        *(_balancing(config.model) if Claim.ROUTER in claimed else ()),
        *_recompute(config),
        *_gradients(config),
        *_schedule(config),
        *_data(config, claimed),
    ]


def _attention(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups is not None and heads % groups:
        yield (
            f"model.num_attention_heads={heads} is not a multiple of "
            f"model.num_query_groups={groups}; use {one_of(divisors(heads))} groups"
        )
    if model.qk_layernorm and model.qk_l2_norm:
        yield (
            "model.qk_layernorm=true and model.qk_l2_norm=true both normalize queries and keys; "
            "leave one of them out"
        )
    every = model.window_attn_skip_freq
    if every is not None and not model.window_size:
        yield f"model.window_attn_skip_freq={show(every)} needs model.window_size"
    yield from _frequency(model, "window_attn_skip_freq")
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={heads}; use {around(model.hidden_size, heads)}, or set "
            "model.kv_channels"
        )
        return  # the head size is undefined, so RoPE pairs cannot be checked
    width = model.kv_channels or model.hidden_size // heads
    if model.position_embedding_type == "rope" and int(width * model.rotary_percent) % 2:
        named = (
            f"model.kv_channels={width}"
            if model.kv_channels
            else f"a head's width of {width} (model.hidden_size={model.hidden_size} over "
            f"model.num_attention_heads={heads})"
        )
        yield (
            f"RoPE rotates pairs of entries, but {named} times "
            f"model.rotary_percent={model.rotary_percent} is odd"
        )


def _experts(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts = model.num_moe_experts
    if experts is None:
        if (width := model.moe_ffn_hidden_size) is not None:
            yield f"model.moe_ffn_hidden_size={width} needs model.num_moe_experts"
        return
    if model.moe_router_topk > experts:
        yield (
            f"model.moe_router_topk={model.moe_router_topk} is more than "
            f"model.num_moe_experts={experts}; use at most {experts}"
        )
    yield from _frequency(model, "moe_layer_freq")
    yield from _router(model)


def _frequency(model: FieldSection, name: str) -> Iterator[str]:
    """Check an option that is a flag of each layer, or every so many layers."""
    if isinstance(model[name], tuple) and len(model[name]) != model.num_layers:
        yield (
            f"model.{name} has {len(model[name])} entries; expected one for each of "
            f"model.num_layers={model.num_layers}"
        )
    elif model[name] == 0:
        yield f"model.{name}=0: expected at least 1, every so many layers"


def _router(model: FieldSection) -> Iterator[str]:
    score = model.moe_router_score_function
    softmax_after = score == "softmax" and not model.moe_router_pre_softmax
    sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
    if model.moe_router_topk == 1 and softmax_after and not sinkhorn:
        yield (
            "model.moe_router_topk=1 leaves a softmax over one value, which has no gradient; set "
            "model.moe_router_pre_softmax=true"
        )
    if model.moe_router_enable_expert_bias and score != "sigmoid":
        needed = "model.moe_router_score_function=sigmoid"
        yield f"model.moe_router_enable_expert_bias=true needs {needed}"
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if chosen and not groups:
        yield f"model.moe_router_group_topk={chosen} needs model.moe_router_num_groups"
    elif groups:
        if model.num_moe_experts % groups:
            over = "model.moe_router_num_groups"
            yield cannot_split("model.num_moe_experts", model.num_moe_experts, over, groups)
        elif chosen and chosen * (model.num_moe_experts // groups) < model.moe_router_topk:
            yield (
                f"model.moe_router_topk={model.moe_router_topk} is more than the experts of "
                f"model.moe_router_group_topk={chosen} of {groups} groups"
            )
        if chosen and chosen > groups:
            yield (
                f"model.moe_router_group_topk={chosen} is more than "
                f"model.moe_router_num_groups={groups}"
            )


def _balancing(model: FieldSection) -> Iterator[str]:
    """Check the balancing options for a plugin's router that supports all of Megatron's."""
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if isinstance(kinds, tuple) != isinstance(coefficients, tuple) or (
        isinstance(kinds, tuple) and len(kinds) != len(coefficients)
    ):
        yield (
            f"model.moe_router_load_balancing_type={show(kinds)} and "
            f"model.moe_aux_loss_coeff={show(coefficients)} must be two lists of one length, or "
            "two single values"
        )
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    for kind in kinds if isinstance(kinds, tuple) else [kinds]:
        if kind not in known:
            named = f"model.moe_router_load_balancing_type={kind!r}"
            yield f"{named}: expected one of {', '.join(known)}"


def _recompute(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if model[name] is None:
                yield f"model.recompute_granularity='full' needs model.{name}"
    if model.recompute_granularity == "selective" and model.recompute_num_layers is not None:
        yield (
            f"model.recompute_num_layers={model.recompute_num_layers} does not go with "
            "model.recompute_granularity='selective', which takes every layer; leave it out"
        )
    if model.recompute_granularity == "selective":
        for module in model.recompute_modules or ():
            if (why := _NOT_RECOMPUTED.get(module)) is not None:
                yield (
                    f"model.recompute_modules names {show(module)}: {why}; leave it out, or use "
                    "core_attn, mlp, moe or shared_experts"
                )
    if config.parallel.sequence_parallel and model.distribute_saved_activations:
        yield (
            "model.distribute_saved_activations=true does not go with "
            "parallel.sequence_parallel=true; leave it out"
        )


def _gradients(config: RunConfig) -> Iterator[str]:
    ddp = config.ddp
    needs = {
        "overlap_param_gather": ("use_distributed_optimizer", "overlap_grad_reduce"),
        "bucket_size": ("overlap_grad_reduce",),
    }
    for name, others in needs.items():
        missing = [f"ddp.{other}=true" for other in others if not getattr(ddp, other)]
        if getattr(ddp, name) and missing:
            yield f"ddp.{name}={show(getattr(ddp, name))} needs {' and '.join(missing)}"


def _schedule(config: RunConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.train.train_iters
    given = optimizer.lr_decay_iters
    decay = steps if given is None else given
    named = "train.train_iters" if given is None else "optimizer.lr_decay_iters"
    if decay < 0 or given == 0:
        yield f"optimizer.lr_decay_iters={decay} must be above 0"
    elif optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay:
        yield (
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} must be below "
            f"{named}={decay}, or the learning rate never decays"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}"
    final = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD":
        if final is None:
            yield "optimizer.lr_decay_style='WSD' needs optimizer.lr_wsd_decay_iters"
        elif not 0 < final <= decay - optimizer.lr_warmup_iters:
            yield (
                f"optimizer.lr_wsd_decay_iters={final} must be above 0 and fit between "
                f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} and {named}={decay}"
            )
    elif final is not None:
        yield (
            f"optimizer.lr_wsd_decay_iters={final} needs optimizer.lr_decay_style='WSD', not "
            f"{optimizer.lr_decay_style!r}"
        )
    if optimizer.loss_scale is not None and config.train.precision != "fp16":
        yield (
            f"optimizer.loss_scale={optimizer.loss_scale} needs train.precision='fp16', not "
            f"{config.train.precision!r}"
        )
    if optimizer.loss_scale is not None and optimizer.loss_scale <= 0:
        yield f"optimizer.loss_scale={optimizer.loss_scale} must be above 0"
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield (
            f"optimizer.min_loss_scale={optimizer.min_loss_scale} is above "
            f"optimizer.initial_loss_scale={optimizer.initial_loss_scale}"
        )


def _data(config: RunConfig, claimed: Collection[Claim]) -> Iterator[str]:
    data, longest = config.data, config.model.max_position_embeddings
    stretches = config.model.rope_scaling_type == "dynamic"  # by sequence length
    is_checked = {Claim.DATASET, Claim.DOCUMENTS} <= {*claimed}  # by the task: each document
    if longest is not None and data.seq_length > longest and not (stretches or is_checked):
        yield (
            f"data.seq_length={data.seq_length} is more than "
            f"model.max_position_embeddings={longest}; use at most {longest}"
        )
    for name in ("train", "validation"):
        prefixes, weights = getattr(data, name), getattr(data, f"{name}_weights")
        if weights and len(weights) != len(prefixes):
            yield (
                f"data.{name}_weights has {len(weights)} weights for {len(prefixes)} prefixes in "
                f"data.{name}; give one for each, or none"
            )
        if any(not weight > 0 for weight in weights):
            yield (
                f"data.{name}_weights={list(weights)} must be above 0; leave a dataset out to give "
                "it no share"
            )
    if config.checkpoint.step is not None and config.checkpoint.step < 0:
        yield f"checkpoint.step={config.checkpoint.step} must not be negative"
