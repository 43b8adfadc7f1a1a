"""Build the models of a run, and the data parallelism and optimizer of the trained one."""

from __future__ import annotations

import torch

from ascend_run.core.hooks import Hooks
from ascend_run.core.model.build import build_model
from ascend_run.plugin_api import contracts as c

from .data_parallel import wrap_data_parallel
from .optimizer import build_optimizer
from .phases import phase_scope


def build_models(
    task: c.Task,
    hooks: Hooks,
    context: c.RunContext,
    num_microbatches: int,
    *,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
) -> None:
    """Build the model of every role and add it to the context. The first role is trained.

    Args:
        dtype: Parameter dtype. Default: the dtype of ``train.precision``.
        with_optimizer: If False, gradients are computed but there is no optimizer.
    """
    config, groups = context.config, context.groups
    for role in task.roles:
        with phase_scope(hooks, context, c.RunPhase.MODEL)():
            bundle = build_model(config, hooks, groups, context.device, role=role, dtype=dtype)
            context.models[role] = bundle
            if role == task.roles[0]:
                wrap_data_parallel(bundle, config, hooks, groups, num_microbatches)
        if role == task.roles[0] and with_optimizer:
            with phase_scope(hooks, context, c.RunPhase.OPTIMIZER)():
                build_optimizer(bundle, hooks, context)


def release_graphs(context: c.RunContext) -> None:
    """Drop the graph of the last micro-batch, so that models and process groups can be freed.

    Megatron's token dispatcher holds the router probabilities, which reference the autograd graph
    and, through the gradient-reduction hooks, the dispatcher. Python's garbage collector cannot see
    this reference cycle because it passes through C++.
    """
    for bundle in context.models.values():
        for chunk in bundle.chunks:
            for module in chunk.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if dispatcher is not None and hasattr(dispatcher, "probs"):
                    dispatcher.probs = None
