"""The models of a run, and around the one that trains its data parallelism and its optimizer."""

from __future__ import annotations

import torch

from ascend_run.core.hooks import Hooks
from ascend_run.core.model.build import build_model
from ascend_run.plugin_api import contracts as c

from .data_parallel import wrap_data_parallel
from .optimizer import build_optimizer


def build_models(
    task: c.Task,
    hooks: Hooks,
    context: c.RunContext,
    num_micro_batches: int,
    *,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
) -> None:
    """Every role's model into the context; the first role trains.

    Args:
        dtype: Of the parameters; default: what ``train.precision`` names.
        with_optimizer: Or gradients are all that is asked for.
    """
    config, groups = context.config, context.groups
    for role in task.roles:
        bundle = build_model(config, hooks, groups, context.device, role=role, dtype=dtype)
        context.models[role] = bundle
        if role == task.roles[0]:
            wrap_data_parallel(bundle, config, hooks, groups, num_micro_batches)
            if with_optimizer:
                build_optimizer(bundle, config, hooks, groups)
