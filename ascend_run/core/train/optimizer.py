"""The optimizer and its schedule: a torch optimizer inside Megatron's mixed-precision ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.config.optimizer import optimizer_spec
from ascend_run.core.hooks import Hooks
from ascend_run.core.model.initialization import named_parameters
from ascend_run.ops.optimizer_states import state_problems
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.config import RunConfig

from .megatron_optimizers import Described
from .optimizer_kinds import ParamGroup, any_rank, dense_kind, expert_kind, replicated, sharded

if TYPE_CHECKING:
    from megatron.core.optimizer.grad_scaler import MegatronGradScaler

_Options: TypeAlias = tuple[tuple[str, Hashable], ...]
"""Per-parameter options, sorted by name."""


def build_optimizer(bundle: c.ModelBundle, hooks: Hooks, context: c.RunContext) -> None:
    """Give a model its optimizer and its schedule.

    Dense and expert parameters get separate optimizers if they are sharded over different ranks,
    because their gradient norms are reduced over different groups.
    """
    config, groups = context.config, context.groups
    options = _optimizer_config(config)
    spec = optimizer_spec(config, hooks)
    param_groups = parameter_groups(bundle.chunks, config, spec)
    scaler = _grad_scaler(options)
    wrap: c.Wrapper[Any] = hooks.composed(
        "ascend_mixed_precision_optimizer", config=config, device=context.device
    )
    kinds = [dense_kind(groups)]
    if any_rank(any(group["is_expert_parallel"] for group in param_groups)):
        kinds.append(expert_kind(groups))
    parts = []
    for kind in kinds:
        # A stage without such parameters needs the optimizer too: the norm is reduced over all
        # stages.
        own = [group for group in param_groups if group["is_expert_parallel"] is kind.is_expert]
        own = own or [_group([], config, decays=True, is_expert=kind.is_expert)]
        if options.use_distributed_optimizer:
            parts.append(sharded(own, spec, options, scaler, kind, bundle, groups, wrap))
        else:
            parts.append(replicated(own, spec, options, scaler, kind, wrap))
    bundle.optimizer = _Chained(parts, scaler, spec)
    bundle.optimizer_spec = spec
    bundle.scheduler = _scheduler(bundle.optimizer, config)


def parameter_groups(
    chunks: Sequence[nn.Module], config: RunConfig, spec: c.OptimizerSpec | None = None
) -> list[ParamGroup]:
    """Group trainable parameters by weight decay, by expert parallelism and by the per-parameter
    options of the optimizer, with Megatron's keys.

    Vectors (norms and biases) have no weight decay; nor have the biases of experts, which are
    stacked.
    """
    buckets: dict[tuple[bool, bool, _Options], list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in named_parameters(unwrapped(chunk)):
            if parameter.requires_grad:
                is_expert = not getattr(parameter, "allreduce", True)
                decays = parameter.ndim > 1 and not name.endswith("_bias")
                own = {} if spec is None else spec.parameter_options(name, decays)
                options = tuple(sorted(own.items()))
                buckets.setdefault((decays, is_expert, options), []).append(parameter)
    return [
        _group(parameters, config, decays=decays, is_expert=is_expert) | dict(options)
        for (decays, is_expert, options), parameters in sorted(
            buckets.items(), key=lambda item: item[0][:2], reverse=True
        )
    ]


def _group(
    parameters: list[nn.Parameter], config: RunConfig, *, decays: bool, is_expert: bool
) -> ParamGroup:
    return {
        "params": parameters,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": is_expert,
        "max_lr": config.optimizer.lr,
        "min_lr": config.optimizer.min_lr,
        "default_config": True,
    }


def _optimizer_config(config: RunConfig) -> OptimizerConfig:
    options = config.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        bf16=config.train.precision == "bf16",
        fp16=config.train.precision == "fp16",
        clip_grad=options.clip_grad,
        loss_scale=options.loss_scale,
        initial_loss_scale=options.initial_loss_scale,
        min_loss_scale=options.min_loss_scale,
        loss_scale_window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        overlap_param_gather=config.ddp.overlap_param_gather,
    )


class _DynamicScaler(DynamicGradScaler):
    """A loss scale shared by several optimizers and updated once per step.

    If each optimizer had its own scale, as in Megatron, an overflow in one would leave the others
    at a scale that differs from the one applied to the loss.
    """

    def update(self, found_inf: bool) -> None:
        """Ignore the update of a single optimizer; see :meth:`update_once`."""

    def update_once(self, found_inf: bool) -> None:
        super().update(found_inf)


class _Chained(ChainedOptimizer):
    """Optimizers that step together and share one loss scale.

    Also wraps a single optimizer, since Megatron's own step computes no gradient norm, which is
    logged, if it does not clip.
    """

    def __init__(
        self,
        parts: list[Described],
        scaler: MegatronGradScaler | None,
        spec: c.OptimizerSpec,
    ) -> None:
        super().__init__(cast("list[MegatronOptimizer]", parts))
        self.dynamic_scaler = scaler if isinstance(scaler, _DynamicScaler) else None
        self._unchecked: c.OptimizerSpec | None = spec

    def prepare_grads(self) -> bool:
        found_inf: bool = super().prepare_grads()
        if self.dynamic_scaler is not None:
            self.dynamic_scaler.update_once(found_inf)
        return found_inf

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, None]:
        """Step as Megatron does, but clip with ``_clip``. The first step checks the states.

        Raises:
            HookError: The optimizer keeps other states than its OptimizerSpec declares.
        """
        if self.prepare_grads():
            return False, None, None
        take_norm: Callable[[], float] = self.get_grad_norm
        norm = float(take_norm())
        for part in self.chained_optimizers:
            _clip(part, norm)
        succeeded = self.step_with_ready_grads()
        if self._unchecked is not None:
            _check_states(self.chained_optimizers, self._unchecked)
            self._unchecked = None
        return succeeded, norm, None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step as Megatron does, but all-gather sharded parameters only once.

        In Megatron each part would gather the parameters of all parts.
        """
        *before, last = cast("list[Described]", self.chained_optimizers)
        for part in before:
            part.update()
        return last.step_with_ready_grads()


def _check_states(parts: Sequence[MegatronOptimizer], spec: c.OptimizerSpec) -> None:
    for part in parts:
        if problems := state_problems(part.optimizer, spec.states):
            name = type(part.optimizer).__name__
            raise HookError(f"{name} keeps other states than its OptimizerSpec declares", problems)


def _clip(part: MegatronOptimizer, norm: float) -> None:
    """Scale gradients in place by ``clip_grad / norm`` if that is below 1.

    Without Apex or Transformer Engine, Megatron allocates every gradient again and copies it back.
    """
    gradients = [p.grad for p in part.get_parameters() if p.grad is not None]
    factor = part.config.clip_grad / (norm + 1e-6)
    if gradients and 0.0 < factor < 1.0:
        torch._foreach_mul_(gradients, factor)


def _grad_scaler(options: OptimizerConfig) -> MegatronGradScaler | None:
    if options.loss_scale:
        return ConstantGradScaler(options.loss_scale)
    if not options.fp16:
        return None
    return _DynamicScaler(
        initial_scale=options.initial_loss_scale,
        min_scale=options.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(options.loss_scale_window),
        hysteresis=options.hysteresis,
    )


def _scheduler(optimizer: MegatronOptimizer, config: RunConfig) -> OptimizerParamScheduler:
    options = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters,
        lr_decay_steps=max(1, options.lr_decay_iters or config.train.train_iters),
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=options.lr_wsd_decay_iters,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )
