"""Plugins that provide a part of the model or of the step: the one that a run has without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api import hookimpl

from .idle import Idle, manifest

Wrapper = Callable[[Any], Any]
_ANY_ATTENTION: Final = c.AttentionFeatures.all_but()


class ProvidesThePlatformsKernel:
    manifest = manifest("provides-the-platforms-kernel", attention=_ANY_ATTENTION)

    @hookimpl
    def ascend_attention_kernel(self, ops: c.PlatformOps) -> c.AttentionKernel:
        return next(iter(ops.attention_kernels.values()))()


class DelegatesAttention:
    manifest = manifest("delegates-attention", attention=_ANY_ATTENTION)

    @hookimpl
    def ascend_attention(self) -> Callable[[c.AttentionKernel], c.AttentionKernel]:
        return _DelegatingKernel


class _DelegatingKernel:
    def __init__(self, inner: c.AttentionKernel) -> None:
        self.inner, self.features = inner, inner.features
        self.backward_reads = inner.backward_reads

    def forward(self, *args: Any) -> c.AttentionResult:
        return self.inner.forward(*args)

    def backward(self, *args: Any) -> tuple[Any, ...]:
        return self.inner.backward(*args)


class ExchangesWithContextParallelismOnly:
    """Verified on tensor-parallel ranks, where it has no sequence to exchange."""

    manifest = manifest("exchanges-with-context-parallelism-only", attention=_ANY_ATTENTION)

    @hookimpl
    def ascend_attention(self, groups: Any) -> Wrapper | None:
        return _DelegatingKernel if groups.cp.size() > 1 else None


class BiasesNoLayer:
    manifest = manifest("biases-no-layer")

    @hookimpl
    def ascend_position_bias(self, layer_index: int) -> None: ...


class ProvidesTheLoopOverExperts:
    manifest = manifest("provides-the-loop-over-experts")

    @hookimpl
    def ascend_experts(self) -> c.ExpertsKernel:
        from ascend_run.ops.experts.loop_experts import loop_experts

        return loop_experts


class ProvidesTheBuiltInRouter:
    manifest = manifest("provides-the-built-in-router")

    @hookimpl
    def ascend_router(self) -> Any:
        from ascend_run.core.model.router import Router

        return Router


class DispatchesAsAlways:
    """Between two expert-parallel ranks."""

    manifest = manifest("dispatches-as-always")

    @hookimpl
    def ascend_token_dispatcher(self) -> Wrapper:
        return lambda dispatcher: dispatcher


class KeepsTheNorm:
    """On every device but its own."""

    manifest = manifest("keeps-the-norm")

    @hookimpl
    def ascend_norm(self, device: c.Device) -> None: ...


class StoresNoWeight:
    manifest = manifest("stores-no-weight")

    @hookimpl
    def ascend_weight_storage(self, role: str) -> None: ...


class ReplacesOperatorsByThemselves:
    manifest = manifest("replaces-operators-by-themselves")

    @hookimpl
    def ascend_fused_operators(self) -> Wrapper:
        def replaced(ops: c.PlatformOps) -> c.PlatformOps:
            return attrs.evolve(ops, swiglu=lambda x: ops.swiglu(x), rms_norm=ops.rms_norm)

        return replaced


class ConfiguresTheDefaults:
    """Sets arguments to the values that they have."""

    manifest = manifest("configures-the-defaults")

    @hookimpl
    def ascend_configure(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        return lambda arguments: {**arguments, "apply_residual_connection_post_layernorm": False}


class ProvidesMegatronsDataParallelism:
    """On two data-parallel ranks, which have it without the plugin."""

    manifest = manifest("provides-megatrons-data-parallelism")

    @hookimpl
    def ascend_data_parallel(self) -> Callable[..., Any]:
        from megatron.core.distributed import DistributedDataParallel

        return DistributedDataParallel


class OptimizesAsAlways:
    manifest = manifest("optimizes-as-always")

    @hookimpl
    def ascend_optimizer(self, config: Any) -> c.OptimizerSpec:
        options = config.optimizer

        def make(groups: list[dict[str, Any]]) -> Any:
            from torch.optim import AdamW

            return AdamW(
                groups,
                lr=options.lr,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_eps,
                weight_decay=options.weight_decay,
                fused=True,
            )

        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), c.OptimizerState())
        states = {"step": c.OptimizerState(scalar=True), **moments}
        return c.OptimizerSpec(build=make, states=states, element_wise=True)

    @hookimpl
    def ascend_mixed_precision_optimizer(self) -> Wrapper:
        return lambda inner: type(inner.__name__, (inner,), {})


class SchedulesAsAlways:
    """Over two pipeline stages."""

    manifest = manifest("schedules-as-always")

    @hookimpl
    def ascend_schedule(self) -> Wrapper:
        return lambda inner: lambda *args, **kwargs: inner(*args, **kwargs)


class HooksGradients:
    """Of every parameter, with a hook that returns None."""

    manifest = manifest("hooks-gradients")

    @hookimpl
    def ascend_model(self) -> Wrapper:
        def wrap(model: Any) -> Any:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: None)
            return model

        return wrap


class LeavesNoLayerEmpty:
    manifest = manifest("leaves-no-layer-empty")

    @hookimpl
    def ascend_empty_layers(self) -> Sequence[int]:
        return ()


class RecomputesNothing:
    """Of the MLPs that it says to recompute."""

    manifest = manifest("recomputes-nothing")

    @hookimpl
    def ascend_activation_policy(self) -> Mapping[str, c.ActivationTreatment]:
        def links(layer: Any, parts: Sequence[str], device: object) -> dict[str, c.ForwardLink]:
            link = c.ForwardLink(wrap=lambda inner: partial(inner), compilable=True)
            return dict.fromkeys(parts, link)

        return {"mlp": c.ActivationTreatment(c.Keeping.RECOMPUTE, links)}


class AddsAFieldToTheBatch:
    """Which nothing reads."""

    manifest = manifest("adds-a-field-to-the-batch")

    @hookimpl
    def ascend_batch(self) -> Wrapper:
        def wrap(batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
            for batch in batches:
                tensors = {**batch.tensors, "unread": batch.tensors["tokens"] * 0}
                fields = {**batch.fields, "unread": batch.fields["tokens"]}
                yield attrs.evolve(batch, tensors=tensors, fields=fields)

        return wrap


PLUGINS: Final = (
    Idle(plugin=ProvidesThePlatformsKernel),
    Idle(plugin=DelegatesAttention),
    Idle(plugin=ExchangesWithContextParallelismOnly, layout={"tp": 2}),
    Idle(plugin=BiasesNoLayer),
    Idle(plugin=ProvidesTheLoopOverExperts, model="moe"),
    Idle(plugin=ProvidesTheBuiltInRouter, model="moe"),
    Idle(plugin=DispatchesAsAlways, layout={"ep": 2}, model="moe"),
    Idle(plugin=KeepsTheNorm),
    Idle(plugin=StoresNoWeight),
    Idle(plugin=ReplacesOperatorsByThemselves),
    Idle(plugin=ConfiguresTheDefaults),
    Idle(plugin=ProvidesMegatronsDataParallelism, layout={"dp": 2}),
    Idle(plugin=OptimizesAsAlways),
    Idle(plugin=SchedulesAsAlways, layout={"pp": 2}),
    Idle(plugin=HooksGradients),
    Idle(plugin=LeavesNoLayerEmpty),
    Idle(plugin=RecomputesNothing),
    Idle(plugin=AddsAFieldToTheBatch),
)
