"""Megatron's optimizers, which also describe what they update.

Checkpoints, fingerprints and ``verify`` read that instead of Megatron's lists of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from ascend_run.plugin_api import contracts as c

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class Described(MegatronOptimizer):
    """What all of them have in common; see ``MixedPrecisionOptimizer``."""

    def stepped(self) -> Iterator[c.SteppedParameter]:
        """Yield every parameter that it updates on this rank."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield c.SteppedParameter(parameter, parameter, self.optimizer)

    def update(self) -> None:
        """Step with ready gradients and update the model weights, without an all-gather."""
        self.optimizer.step()
        self.refresh()

    def refresh(self) -> None:
        """Copy the master weights to the model weights; here they are the same."""

    def materialized(self) -> AbstractContextManager[None]:
        """Hold the master weights in the ``stepped`` tensors; they always are."""
        return nullcontext()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step, then all-gather what is sharded; return that it succeeded."""
        self.update()
        return True


class WithMasterWeights(Described):
    """Of parameters that are copied from master weights, by a class of Megatron beside it."""

    def refresh(self) -> None:
        of_megatron: Any = self
        of_megatron._copy_main_params_to_model_params()


class Float32(Described, FP32Optimizer):
    """Of float32 parameters that are not sharded."""


class Replicated(WithMasterWeights, Float16OptimizerWithFloat16Params):
    """Of half-precision parameters, with master weights on every data-parallel rank."""

    def stepped(self) -> Iterator[c.SteppedParameter]:
        inner = self.optimizer
        for half_precision, mains in zip(
            self.float16_groups, self.fp32_from_float16_groups, strict=True
        ):
            for parameter, main in zip(half_precision, mains, strict=True):
                yield c.SteppedParameter(parameter, main, inner)
        for group in self.fp32_from_fp32_groups:
            for parameter in group:
                yield c.SteppedParameter(parameter, parameter, inner)


class Sharded(WithMasterWeights, DistributedOptimizer):
    """Of parameters whose update is sharded over the data-parallel ranks."""

    def stepped(self) -> Iterator[c.SteppedParameter]:
        pairs = (
            *zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True),
            *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True),
        )
        for parameters, shards in pairs:
            for parameter, shard in zip(parameters, shards, strict=True):
                own = self._get_model_param_range_map(parameter)["param"]
                yield c.SteppedParameter(parameter, shard, self.optimizer, (own.start, own.end))

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        self.update()
        for chunk in cast("list[DistributedDataParallel]", self.model_chunks):
            if not chunk.ddp_config.overlap_param_gather:  # else its next forward gathers
                chunk.start_param_sync()
        return True
