"""The optimizer of a run, and the default. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.config import RunConfig
from ascend_run.types.optimizer import OptimizerSpec, OptimizerState

if TYPE_CHECKING:
    import torch


def optimizer_spec(config: RunConfig, hooks: Hooks) -> OptimizerSpec:
    """Return the optimizer that a plugin provides, or AdamW.

    Raises:
        HookError: As ``named_optimizer_spec``.
    """
    return named_optimizer_spec(config, hooks)[1]


def named_optimizer_spec(config: RunConfig, hooks: Hooks) -> tuple[str, OptimizerSpec]:
    """Return the same, and the name of the plugin; empty: the default.

    Raises:
        HookError: A plugin returns anything but an OptimizerSpec.
    """
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
