"""Gradients of a run against those of transformers, which are written and read like weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.small_runs import standing_rank


def errors_of_gradients(run: Mapping[str, Any], theirs: str) -> dict[str, float]:
    """Return the largest error of each parameter's gradient, relative to its largest element. A job
    for the pool.

    Args:
        theirs: Folder whose weights are transformers' gradients.
    """
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.testing.dry_run import DryRun, gradient_of

    with standing_rank(run) as (hooks, context):
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        dry_run.load_weights()
        samples = dry_run.task_samples(context.config.train.global_batch_size)
        assert samples is not None
        dry_run.gradients(forward_backward, dry_run.batches(samples, first=0))
        (chunk,) = dry_run.bundle.chunks
        found = {name: gradient_of(p) for name, p in chunk.named_parameters()}
        ours = {name: g.clone() for name, g in found.items() if g is not None}
        assert ours.keys() == found.keys()
        family = hooks.require("ascend_model_family")
        load_model(theirs, family, context.config, dry_run.bundle)
        return {
            name: float((ours[name] - p.detach()).abs().max() / p.detach().abs().max())
            for name, p in chunk.named_parameters()
        }


def write_gradients(model: nn.Module, folder: Path) -> None:
    """Write a folder whose weights are a model's gradients."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, one in zip(twin.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            parameter.copy_(one.grad)
    twin.save_pretrained(folder)
