"""The optimizer; imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from ascend_run.ops.bf16_residual import Bf16Residual
from ascend_run.ops.optimizer_buckets import buckets, stepping_some, updated_elements

if TYPE_CHECKING:
    from ascend_run.plugin_api import MixedPrecisionOptimizer, SteppedParameter


def reusing(
    inner: type[MixedPrecisionOptimizer], bucket_size: int
) -> type[MixedPrecisionOptimizer]:
    """Return a subclass that keeps its master weights in two halves.

    Args:
        bucket_size: See ``ReuseFp32ParamConfig``.
    """
    return type(inner.__name__, (_Reusing, inner), {"bucket_size": bucket_size})


class _Reusing(MegatronOptimizer):
    """Mixed into Megatron's optimizers.

    The model's weights are the halves that forward and backward read. Between steps the tensor of a
    master weight has its shape and no memory: it is one NaN, expanded. During a step the master
    weights of a bucket are put together, stepped and taken apart, bucket by bucket.
    """

    bucket_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._residuals: dict[Tensor, Bf16Residual] = {}
        self._weights = {
            item.stepped: updated_elements(item)
            for item in self._inherited().stepped()
            if (item.parameter.dtype, item.stepped.dtype) == (torch.bfloat16, torch.float32)
        }
        for main in self._weights:
            self._take_apart(main)

    def stepped(self) -> Iterator[SteppedParameter]:
        """Yield every parameter that it updates on this rank."""
        for item in self._inherited().stepped():
            if item.stepped in self._weights:
                yield attrs.evolve(item, read=partial(self._read, item.stepped))
            else:
                yield item

    @torch.no_grad()
    def update(self) -> None:
        """Step bucket by bucket; each is a call of the inner optimizer with parts of its groups."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        numels = [p.numel() if p in self._weights else 0 for p in parameters]
        ranges = [*buckets(numels, self.bucket_size)]
        scratch = self._scratch(max((sum(numels[at] for at in one) for one in ranges), default=0))
        with stepping_some(self.optimizer) as step:
            for one in ranges:
                bucket = [parameters[at] for at in one]
                with self._in_float32([p for p in bucket if p in self._weights], scratch):
                    step(bucket)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights that are whole to the model weights."""
        for main, weight in self._weights.items():
            if main not in self._residuals:
                weight.copy_(main.detach().view(-1))

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Set the master weights to the model weights."""
        assert state_dict is None
        for main in self._residuals:
            self._residuals[main] = Bf16Residual(self._weights[main])

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Hold the master weights in their tensors, to be read and written; they then take the
        memory that they take without this plugin."""
        with torch.no_grad():
            mains = [*self._residuals]
            for main in mains:
                self._put_together(main, self._scratch(main.numel()))
                del self._residuals[main]
        try:
            yield
        finally:
            with torch.no_grad():
                for main in mains:
                    self._take_apart(main)

    @contextmanager
    def _in_float32(self, mains: Sequence[Tensor], scratch: Tensor) -> Iterator[None]:
        end = 0
        for main in mains:
            start, end = end, end + main.numel()
            self._put_together(main, scratch[start:end])
        try:
            yield
        finally:
            for main in mains:
                self._take_apart(main)

    def _put_together(self, main: Tensor, values: Tensor) -> None:
        self._residuals[main].join(self._weights[main], values)
        main.data = values.view(main.shape)

    def _take_apart(self, main: Tensor) -> None:
        weight = self._weights[main]
        residual = self._residuals.get(main) or Bf16Residual(weight)
        residual.split(main.detach().view(-1), weight)
        self._residuals[main] = residual
        main.data = main.new_full((), torch.nan).expand(main.shape)

    def _read(self, main: Tensor, where: Tensor) -> Tensor:
        if main in self._residuals:
            return self._residuals[main].values_at(self._weights[main], where)
        return main.detach().view(-1).index_select(0, where)

    def _scratch(self, numel: int) -> Tensor:
        device = next((weight.device for weight in self._weights.values()), None)
        return torch.empty(numel, dtype=torch.float32, device=device)

    def _inherited(self) -> MixedPrecisionOptimizer:
        return cast("MixedPrecisionOptimizer", super())
