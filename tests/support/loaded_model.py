"""Loads a model from a Hugging Face folder and runs it once; a job for the pool of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.prepare.config.loading import build_config, read_raw
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.testing.runtime import RankOutcome, Shard
from tests.support.small_runs import Values, outcome_of, standing_rank

if TYPE_CHECKING:
    from ascend_run.testing.dry_run import DryRun


@attrs.frozen
class Outcome:
    """One rank's results."""

    logits_BSV: Tensor | None
    """None if the vocabulary is sharded over ranks."""
    loss: Tensor
    """Sum over all tokens."""
    gradients: dict[str, Tensor]
    """Of this rank's parameters, by their names in the full model."""
    shards: RankOutcome
    """The same as shards of the full tensors."""


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Return the max error relative to the largest expected value."""
    assert got.shape == want.shape
    assert want.abs().max() > 0
    return float((got - want).abs().max() / want.abs().max())


def run_loaded_model(
    family_name: str,
    folder: str,
    tokens: Tensor,
    labels: Tensor,
    overrides: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """Load, forward, backward, through the same steps as a run.

    Args:
        tokens: [B, S] int64.
        labels: [B, S] int64.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.core.model.build import build_model
    from ascend_run.core.model.initialization import named_parameters
    from ascend_run.core.patches import applied_patches
    from ascend_run.core.train.groups import process_groups
    from ascend_run.plugins.platforms.cpu import Cpu
    from ascend_run.plugins.platforms.cpu.options import CpuOptions

    (entry,) = entry_points(group="ascend_run.models", name=family_name)
    plugin_class = entry.load()
    options = getattr(plugin_class, "config_class", None)
    plugin = plugin_class(options()) if options else plugin_class()
    hooks = Hooks([plugin, Cpu(CpuOptions())])
    family = hooks.require("ascend_model_family")
    raw = read_raw(None, [f"model.family={family_name}", f"model.hf_path={folder}", *overrides])
    config = build_config(
        raw,
        {family_name: options},
        family.defaults,
        (),
        hf_values=config_from_hf(family, read_hf_config(Path(folder))),
    ).config
    device = hooks.require("ascend_device", local_rank=0)
    layout = layout_of(config, dist.get_world_size(), dist.get_rank())
    device.activate()
    try:
        with applied_patches(hooks), process_groups(config, layout, device, hooks, {}) as groups:
            model_parallel_cuda_manual_seed(config.run.seed)
            bundle = build_model(config, hooks, groups, device, dtype=dtype)
            load_model(folder, family, config, bundle)
            (model,) = bundle.chunks
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
            logits = model(tokens, places).detach() if groups.tp.size() == 1 else None
            mask = torch.ones_like(labels).float()
            loss = model(tokens, places, labels=labels, loss_mask=mask)
            loss.backward()
            gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
            held = sharded_tensors(bundle.chunks, vocab_size=config.model.vocab_size)
            parts = [
                attrs.evolve(one, tensor=one.tensor.grad)
                for one in held
                if isinstance(one.tensor, torch.nn.Parameter)
            ]
            return Outcome(
                logits, loss.detach(), gradients, outcome_of(model_shards(parts, "model"))
            )
    finally:
        device.deactivate()


def loaded_gradients(
    layouts: Sequence[tuple[Values, Sequence[str]]], tokens: Tensor, labels: Tensor
) -> list[RankOutcome]:
    """Return the mean loss and this rank's reduced gradients in float64, for one layout after the
    other. A job for the pool.

    Args:
        layouts: Config keys, with ``model.hf_path``, and the names of plugins.
        tokens, labels: The global batch, [B, S] int64.
    """
    return [_gradients(values, plugins, tokens, labels) for values, plugins in layouts]


def _gradients(
    values: Values, plugins: Sequence[str], tokens: Tensor, labels: Tensor
) -> RankOutcome:
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.testing.dry_run import DryRun

    ones, places = torch.ones(tokens.shape[1]), torch.arange(tokens.shape[1])
    samples = [
        {"tokens": row, "labels": wanted, "loss_mask": ones, "position_ids": places}
        for row, wanted in zip(tokens, labels, strict=True)
    ]
    with standing_rank(values, plugins) as (hooks, context):
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        family = hooks.require("ascend_model_family")
        load_model(values["model.hf_path"], family, context.config, dry_run.bundle)
        loss = dry_run.gradients(forward_backward, dry_run.batches(samples)).loss
        return RankOutcome(losses=(loss,), grad_norms=(), shards=gradient_shards(dry_run))


def gradient_shards(dry_run: DryRun) -> tuple[Shard, ...]:
    """Return a copy of each parameter's gradient on this rank."""
    from ascend_run.testing.dry_run import gradient_of

    return tuple(
        Shard(
            name=shard.name,
            tensor=None if shard.tensor is None else shard.tensor.clone(),
            offset=shard.offset,
            global_shape=shard.global_shape,
        )
        for shard in dry_run.shards(gradient_of)
    )


def loaded_weights(values: Values) -> RankOutcome:
    """Return this rank's shards of the weights read from ``model.hf_path``. A job for the pool."""
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.core.model.build import build_model

    with standing_rank(values) as (hooks, context):
        config = context.config
        bundle = build_model(config, hooks, context.groups, context.device)
        load_model(config.model.hf_path, hooks.require("ascend_model_family"), config, bundle)
        tensors = sharded_tensors(bundle.chunks, vocab_size=config.model.vocab_size)
        return outcome_of(model_shards(tensors, prefix="model"))
