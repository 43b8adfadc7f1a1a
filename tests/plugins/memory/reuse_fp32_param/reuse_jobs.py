"""Jobs for gloo ranks: steps, some of them skipped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch

from tests.support.small_runs import Training, Values, training
from tests.support.stepping_jobs import Readings, live_tensors, storage_bytes, take_steps


@attrs.frozen
class Steps:
    """What a rank had after each step."""

    readings: Readings
    """Loss, gradient norm and whether it was skipped."""
    digests: list[str]
    """Of every tensor of the checkpoint, master weights and moments included."""
    num_aside: int
    """Values that were kept aside, over all steps."""
    state_bytes: int
    """Bytes of the optimizer's states and of what it keeps of master weights."""
    live_bytes: int
    """Bytes of all tensors that the job holds between steps."""


def stepwise(
    values: Values, enable: Sequence[str], steps: int, overflowing: Collection[int], every: int
) -> Steps:
    """Take steps, some of which overflow; look at the state every so many steps."""
    before = storage_bytes(live_tensors())
    counts: list[int] = []
    with training(values, enable) as run:

        def count() -> None:
            counts.append(sum(residual.num_aside for residual in _residuals(run)))

        readings, digests = take_steps(run, steps, overflowing, every, count)
        live = storage_bytes(live_tensors()) - before
        return Steps(readings, digests, sum(counts), _state_bytes(run), live)


def resting_ties(values: Values, enable: Sequence[str]) -> list[str]:
    """Set some master weights to exact ties, take steps without gradients, and return the
    parameters that are no longer the same; their second moments are zero all the time."""
    from ascend_run.core.checkpoint.optimizer_shards import materialized, stepped_parameters

    with training(values, enable) as run:
        optimizer: Any = run.bundle.optimizer
        names = {id(p): name for name, p in run.bundle.chunks[0].named_parameters()}
        with torch.no_grad(), materialized(optimizer):
            for item in stepped_parameters(optimizer):
                bits = item.stepped.view(-1).view(torch.int32)[::20]
                bits.bitwise_and_(-65536).bitwise_or_(0x8000)
            optimizer.chained_optimizers[0].refresh()
            want = {id(i.stepped): i.stepped.clone() for i in stepped_parameters(optimizer)}
        for _ in range(3):
            for chunk in run.bundle.chunks:
                chunk.zero_grad_buffer()
            for parameter in run.bundle.chunks[0].parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        with materialized(optimizer):
            return [
                names[id(item.parameter)]
                for item in stepped_parameters(optimizer)
                if not torch.equal(item.stepped, want[id(item.stepped)])
                or item.inner.state[item.stepped]["exp_avg_sq"].any()
            ]


def _residuals(run: Training) -> list[Any]:
    parts = run.bundle.optimizer.chained_optimizers  # type: ignore[union-attr]
    return [one for part in parts for one in getattr(part, "_residuals", {}).values()]


def _state_bytes(run: Training) -> int:
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    items = [*stepped_parameters(run.bundle.optimizer)]
    held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
    held += [item.stepped for item in items if item.stepped.dtype != item.parameter.dtype]
    return storage_bytes(held) + sum(residual.nbytes for residual in _residuals(run))
