"""The optimizer of a run: the default, and where another one cannot run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout
from ascend_run.types.optimizer import OptimizerSpec, OptimizerState

if TYPE_CHECKING:
    import torch


def optimizer_spec(config: RunConfig, hooks: Hooks) -> OptimizerSpec:
    """Return the optimizer that a plugin provides, or AdamW.

    Raises:
        HookError: A plugin returns anything but an OptimizerSpec.
    """
    return _named_spec(config, hooks)[1]


def optimizer_problems(config: RunConfig, layout: Layout, hooks: Hooks) -> Iterator[str]:
    """Yield a message for each option with which a rank would hold only some elements of a
    parameter, unless the optimizer supports that.

    Raises:
        HookError: As ``optimizer_spec``.
    """
    name, spec = _named_spec(config, hooks)
    if spec.element_wise:
        return
    whole = f"'{name}' provides an optimizer that is not element-wise: it needs whole parameters, "
    if config.ddp.use_distributed_optimizer:
        yield (
            f"{whole}but ddp.use_distributed_optimizer=true shards the elements of each over "
            "data-parallel ranks; set it to false"
        )
    if spec.tensor_parallel:
        return
    for axis, size in (("tensor_model", layout.tp), ("expert_tensor", layout.expt_tp)):
        if size > 1:
            yield f"{whole}but parallel.{axis}_parallel_size={size} shards them; use 1"


def _named_spec(config: RunConfig, hooks: Hooks) -> tuple[str, OptimizerSpec]:
    name, spec = hooks.provide_named("ascend_optimizer", config=config)
    if spec is None:
        return "", _adamw(config)
    naming = hooks.naming("ascend_optimizer", name)
    if not isinstance(spec, OptimizerSpec):
        with naming:
            raise HookError(f"'{name}' returned {spec!r}; expected an OptimizerSpec")
    options = naming.around(spec.parameter_options)
    return name, attrs.evolve(spec, build=naming.around(spec.build), parameter_options=options)


def _adamw(config: RunConfig) -> OptimizerSpec:
    options = config.optimizer

    def build(param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(
            param_groups,
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    states = {
        "step": OptimizerState(scalar=True),
        "exp_avg": OptimizerState(),
        "exp_avg_sq": OptimizerState(),
    }
    return OptimizerSpec(build=build, states=states, element_wise=True)
