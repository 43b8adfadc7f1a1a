"""Build one model from the config and the hooks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.config.attention_needs import AttentionPart, attention_problems, declared_by
from ascend_run.core.config.vocabulary import has_tied_output, padded_vocab_size
from ascend_run.core.hooks import Hooks
from ascend_run.ops.experts.loop_experts import loop_experts
from ascend_run.ops.linear.stored_weight import StoredWeight, allocate, without_memory
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.contracts import AttentionFeatures
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import RunConfig

from .assembly import Assembly
from .gpt import GPT
from .initialization import initialize_weights
from .layer_slots import layer_numbers
from .mtp import mtp_spec
from .rotary import RotaryTable, RotaryTables
from .rotary_scaling import rotary_scaling
from .seams import LINEARS, layer_linears, wrap_modules
from .spec import block_spec
from .transformer_config import PRECISIONS, make_transformer_config

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import MLATransformerConfig


def assemble(
    config: RunConfig, hooks: Hooks, groups: ProcessGroupCollection, device: c.Device, *, role: str
) -> Assembly:
    """Call every provider hook: once, or once per layer for the attention kernel."""
    asked = {"config": config, "device": device, "groups": groups, "role": role}

    needs = {plugin.manifest.name: plugin.manifest.attention_needs for plugin in hooks.plugins}
    problems: dict[str, None] = {}
    biases: dict[int, c.PositionBias | None] = {}

    def attention_kernel(layer_index: int) -> c.AttentionKernel:
        place = {**asked, "layer_index": layer_index}
        owner, inner = hooks.require_named("ascend_attention_kernel", **place, ops=ops)
        parts = [AttentionPart(plugin=owner, can=declared_by(inner))]

        def watch(plugin: str, given: c.AttentionKernel, outer: c.AttentionKernel) -> None:
            can = declared_by(outer)
            parts.append(AttentionPart(plugin=plugin, can=can, needs=needs[plugin]))

        outer = hooks.wrap("ascend_attention", inner, watch, **place)
        biasing, bias = hooks.provide_named("ascend_position_bias", **place)
        biases[layer_index] = bias
        if bias is not None:
            added = AttentionFeatures(position_bias=True)
            parts.append(AttentionPart(plugin=biasing, can=None, needs=added))
        problems.update(dict.fromkeys(attention_problems(config, parts)))
        result: c.AttentionKernel = outer
        return result

    ops = hooks.wrap(
        "ascend_fused_operators", hooks.require("ascend_platform_ops", **asked), **asked
    )
    return Assembly(
        ops=ops,
        device=device.torch_device,
        attention_kernel=attention_kernel,
        position_biases=biases,
        attention_problems=problems,
        experts_kernel=hooks.provide("ascend_experts", **asked, ops=ops) or loop_experts,
        norm=hooks.provide("ascend_norm", **asked),
        router=hooks.provide("ascend_router", **asked),
        layer_numbers=layer_numbers(config, hooks),
        partition=hooks.provide("ascend_sequence_partition", config=config),
        wraps_output_layer=hooks.implements("ascend_output_layer"),
        loss_chunk_bytes=config.train.loss_chunk_bytes,
        model=config.model,
        groups=groups,
    )


def build_model(
    config: RunConfig,
    hooks: Hooks,
    groups: ProcessGroupCollection,
    device: c.Device,
    *,
    role: str = "policy",
    dtype: torch.dtype | None = None,
) -> c.ModelBundle:
    """Build this rank's part of a model, with each chunk initialized and wrapped by every plugin.

    Data parallelism is added later.

    Args:
        dtype: Parameter dtype. Default: the dtype of ``train.precision``.

    Raises:
        ConfigError: An attention kernel does not declare a feature that the run needs.
    """
    dtype = dtype or PRECISIONS[config.train.precision]
    asked: dict[str, Any] = {"device": device, "groups": groups, "role": role}
    transformer_config = make_transformer_config(config, hooks, dtype, **asked)
    assembly = assemble(config, hooks, **asked)
    policies = activation_policies(config, hooks)
    storing, storage = hooks.provide_named("ascend_weight_storage", config=config, **asked)
    bundle = c.ModelBundle(
        role=role, chunks=[], transformer_config=transformer_config, config=config
    )
    num_chunks = transformer_config.virtual_pipeline_model_parallel_size
    for vp_stage in [None] if num_chunks is None else range(num_chunks):
        with without_memory(*(() if storage is None else LINEARS)):
            chunk = _build_chunk(config, transformer_config, assembly, vp_stage)
        if assembly.attention_problems:
            headline = "the attention kernel does not support this run"
            raise ConfigError(headline, list(assembly.attention_problems))
        for linear in () if storage is None else layer_linears(chunk):
            StoredWeight(storing, storage, linear.weight, device.torch_device)
        allocate(chunk, device.torch_device)
        initialize_weights(
            chunk,
            transformer_config,
            seed=config.run.seed,
            vocab_size=config.model.vocab_size,
            groups=groups,
        )
        whole = wrap_modules(chunk, hooks, assembly.ops, policies, config=config, **asked)
        bundle.chunks.append(whole)
    return bundle


def _build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    assembly: Assembly,
    vp_stage: int | None,
) -> GPT:
    """Build one virtual pipeline chunk of this rank; None for ``vp_stage`` is its only chunk."""
    groups, model = assembly.groups, config.model
    pp_rank, vp_size = groups.pp.rank(), transformer_config.virtual_pipeline_model_parallel_size
    num_layers = get_num_layers_to_build(transformer_config, vp_stage, pp_rank)
    offset = get_transformer_layer_offset(transformer_config, vp_stage, pp_rank)
    vocab = padded_vocab_size(
        model.vocab_size, model.make_vocab_size_divisible_by, groups.tp.size()
    )
    rows = vocab // groups.tp.size()
    stage = cast("int", vp_stage)  # Megatron takes None if there are no chunks
    post_process = is_pp_last_stage(groups.pp) and is_vp_last_stage(stage, vp_size)
    return GPT(
        config=transformer_config,
        transformer_layer_spec=block_spec(
            transformer_config, assembly, range(offset, offset + num_layers)
        ),
        vocab_size=vocab,
        max_sequence_length=model.max_position_embeddings or config.data.seq_length,
        pre_process=is_pp_first_stage(groups.pp) and is_vp_first_stage(stage, vp_size),
        post_process=post_process,
        mtp_block_spec=mtp_spec(transformer_config, assembly) if post_process else None,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=has_tied_output(model),
        pg_collection=groups,
        assembly=assembly,
        rotary=_rotary_table(config, transformer_config, assembly),
        learns_positions=model.position_embedding_type == "learned_absolute",
        valid_rows=min(rows, max(0, model.vocab_size - groups.tp.rank() * rows)),
    )


def _rotary_table(
    config: RunConfig, transformer_config: TransformerConfig, assembly: Assembly
) -> RotaryTable | RotaryTables | None:
    model = config.model
    if model.position_embedding_type != "rope":
        return None
    is_latent = transformer_config.multi_latent_attention
    table = partial(
        RotaryTable,
        cast("MLATransformerConfig", transformer_config).qk_pos_emb_head_dim
        if is_latent
        else int(transformer_config.kv_channels * model.rotary_percent),
        interleaved=model.latent_rotary_interleaved
        if is_latent
        else transformer_config.rotary_interleaved,
        partition=assembly.partition,
        cp_rank=assembly.groups.cp.rank(),
        cp_size=assembly.groups.cp.size(),
        row_length=config.data.seq_length,
    )
    every = table(model.rotary_base, scaling=rotary_scaling(config))
    local = model.rotary_local_base
    return every if local is None else RotaryTables(every, table(local))
