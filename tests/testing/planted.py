"""Plugins made for the kit's own tests: one that is right, and one for each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import (
    Condition,
    Manifest,
    Numerics,
    OptimizerSpec,
    OptimizerState,
    RunConfig,
    hookimpl,
)
from ascend_run.plugin_api import contracts as c

SPLIT = Condition("parallel.context_parallel_size", "<=", 1, why="nothing is split")


class WatchesOneGradient:
    """Base: puts a hook on the gradient of the first layer's output projection."""

    def change(self, gradient: Any) -> Any:
        raise NotImplementedError

    @hookimpl
    def ascend_self_attention(self, layer_index: int) -> c.Wrapper[Any] | None:
        def wrap(module: Any) -> Any:
            module.linear_proj.weight.register_hook(self.change)
            return module

        return wrap if layer_index == 0 else lambda module: module


class ScalesAGradient(WatchesOneGradient):
    """By one part in a million."""

    manifest = Manifest(name="scales-a-gradient", summary="wrong", numerics=Numerics.ROUNDING)

    def change(self, gradient: Any) -> Any:
        return gradient * (1 + 1e-6)


class ZeroesAGradient(WatchesOneGradient):
    """Leaves nothing of one gradient."""

    manifest = Manifest(name="zeroes-a-gradient", summary="wrong", numerics=Numerics.ROUNDING)

    def change(self, gradient: Any) -> Any:
        return gradient * 0


class RoundsOnce(WatchesOneGradient):
    """Moves a gradient by its last bits, though it says that it changes none."""

    manifest = Manifest(name="rounds-once", summary="wrong", numerics=Numerics.BITWISE)

    def change(self, gradient: Any) -> Any:
        return gradient * 3.0 / 3.0


class ForgetsAParameter:
    """One parameter no longer takes part in training."""

    manifest = Manifest(name="forgets-a-parameter", summary="wrong", numerics=Numerics.ROUNDING)

    @hookimpl
    def ascend_self_attention(self, layer_index: int) -> c.Wrapper[Any]:
        def wrap(module: Any) -> Any:
            module.linear_proj.weight.requires_grad_(layer_index != 0)
            return module

        return wrap


class LearnsTwiceAsFast:
    """Every gradient is right and every step is wrong."""

    manifest = Manifest(name="learns-twice-as-fast", summary="wrong", numerics=Numerics.ROUNDING)

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        options = config.optimizer

        def make(groups: list[dict[str, Any]]) -> Any:
            from torch.optim import AdamW

            return AdamW(
                [{**group, "max_lr": 2.0 * group["max_lr"]} for group in groups],
                lr=options.lr,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_eps,
                weight_decay=options.weight_decay,
                fused=True,
            )

        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), OptimizerState())
        states = {"step": OptimizerState(scalar=True), **moments}
        return OptimizerSpec(build=make, states=states, element_wise=True)


class ChangesTheModel:
    """Says so, so it stands on both sides of a comparison."""

    manifest = Manifest(name="changes-the-model", summary="another", numerics=Numerics.MODEL)

    @hookimpl
    def ascend_before_step(self) -> None:
        """Nothing; a plugin must have a hook."""


@attrs.frozen
class Contiguous:
    """contracts.SequencePartition: rank r holds the r-th part, or counts from the end."""

    backwards: bool = False
    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        part = seq_length // size
        place = size - 1 - rank if self.backwards else rank
        return ((place * part, (place + 1) * part),)


class GathersEverything:
    """A minimal context-parallel plugin: every rank attends over all of it."""

    manifest = Manifest(
        name="gathers-everything",
        summary="right",
        idle=SPLIT,
        numerics=Numerics.ROUNDING,
    )
    partition = Contiguous()

    @hookimpl
    def ascend_sequence_partition(self) -> c.SequencePartition:
        return self.partition

    @hookimpl
    def ascend_attention(self, groups: Any) -> Callable[[c.AttentionKernel], c.AttentionKernel]:
        return lambda inner: GatheringKernel(inner, groups.cp)


class GathersInTheWrongOrder(GathersEverything):
    """Deals the sequence out from the end and puts it together from the start."""

    manifest = attrs.evolve(GathersEverything.manifest, name="gathers-in-the-wrong-order")
    partition = Contiguous(backwards=True)


class GatheringKernel:
    """contracts.AttentionKernel: the inner one on what all ranks hold."""

    backward_reads = frozenset({"q", "k", "v"})

    def __init__(self, inner: c.AttentionKernel, group: Any) -> None:
        self.inner, self.group, self.features = inner, group, inner.features

    def forward(self, q: Any, k: Any, v: Any, spec: c.AttentionSpec) -> c.AttentionResult:
        out, lse, _ = self.inner.forward(*map(self._whole, (q, k, v)), spec)
        own = lse.chunk(self.group.size(), dim=-1)[self.group.rank()]
        return c.AttentionResult(self._own(out), own)

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, saved: Any, spec: Any
    ) -> tuple[Any, ...]:
        tensors = {name: self._whole(x) for name, x in (("q", q), ("k", k), ("v", v))}
        out, lse, saved = self.inner.forward(*tensors.values(), spec)
        tensors.update(out=out, lse=lse)
        reads = [
            tensors[name] if name in self.inner.backward_reads else None
            for name in ("q", "k", "v", "out", "lse")
        ]
        gradients = self.inner.backward(self._whole(dout), *reads, saved, spec)
        return tuple(self._own(gradient) for gradient in gradients)

    def _whole(self, x: Any) -> Any:
        import torch
        from torch import distributed as dist

        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts)

    def _own(self, x: Any) -> Any:
        return x.chunk(self.group.size())[self.group.rank()].contiguous()


ALL = (
    ScalesAGradient,
    ZeroesAGradient,
    RoundsOnce,
    ForgetsAParameter,
    LearnsTwiceAsFast,
    ChangesTheModel,
    GathersEverything,
    GathersInTheWrongOrder,
)


class ForgetsItsCount:
    """Lowers the rate by the number of steps that it has seen, and saves that number nowhere."""

    manifest = Manifest(name="forgets-its-count", summary="wrong", numerics=Numerics.MODEL)

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def ascend_before_step(self, context: c.RunContext) -> None:
        for bundle in context.models.values():
            for group in bundle.optimizer.param_groups:  # type: ignore[union-attr]
                group["lr"] /= 1 + self.count

    @hookimpl
    def ascend_after_step(self) -> None:
        self.count += 1


class RestoresRank0:
    """Saves a tensor of each rank, and restores rank 0's on all of them."""

    manifest = Manifest(name="restores-rank-0", summary="wrong", numerics=Numerics.BITWISE)

    def __init__(self) -> None:
        self.count: Any = None

    @hookimpl
    def ascend_after_step(self, context: c.RunContext) -> None:
        import torch

        self.count = torch.tensor([100 * context.step + context.layout.rank])

    @hookimpl
    def ascend_checkpoint_entries(self) -> dict[str, c.CheckpointEntry]:
        return {"counts": self}

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"count": torch.zeros(1, dtype=torch.long) if self.count is None else self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        self.count = state["count"]
        dist.broadcast(self.count, 0)
