"""The state of optimizers: made before it is asked for, cut as its parameter is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.checkpoint.boxes import whole
from ascend_run.core.checkpoint.optimizer_shards import optimizer_shards
from ascend_run.core.checkpoint.regions import Region, ShardedLocal
from ascend_run.plugin_api import CheckpointError


def local(name: str, tensor: Tensor) -> ShardedLocal:
    shape = tuple(tensor.shape)
    region = Region(name, whole(shape), (0,) * len(shape), shape, (0, 0, 0))
    return ShardedLocal(tensor, (region,))


def weights(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (5,), (1,))]


def take_steps(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seeds: range
) -> None:
    for seed in seeds:
        for parameter, gradient in zip(parameters, weights(seed), strict=True):
            parameter.grad = gradient.detach()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW with a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [0, 2])
def test_a_resumed_optimizer_equals_an_uninterrupted_one(
    tmp_path: Path, name: str, saved_after: int
) -> None:
    whole_run, stopped = weights(0), weights(0)
    never_stopped, first = OPTIMIZERS[name](whole_run), OPTIMIZERS[name](stopped)
    take_steps(never_stopped, whole_run, range(1, saved_after + 4))
    take_steps(first, stopped, range(1, saved_after + 1))
    shards = optimizer_shards(first, [local(f"w{i}", p) for i, p in enumerate(stopped)])
    FileStore(tmp_path).save(1, shards, {})

    resumed = [nn.Parameter(p.detach().clone()) for p in stopped]
    second = OPTIMIZERS[name](resumed)
    targets = optimizer_shards(second, [local(f"w{i}", p) for i, p in enumerate(resumed)])
    FileStore(tmp_path).load(1, targets)
    take_steps(second, resumed, range(saved_after + 1, saved_after + 4))
    for got, want in zip(resumed, whole_run, strict=True):
        assert torch.equal(got, want)


def test_an_optimizer_of_an_unknown_kind_is_refused_by_name() -> None:
    class Lion:
        pass

    with pytest.raises(CheckpointError, match="Lion: expected one of torch's own, or a Mixed"):
        optimizer_shards(Lion(), [])


def test_a_state_that_is_not_sharded_like_its_parameter_is_refused() -> None:
    (parameter,) = weights(0)[:1]
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"rows": torch.zeros(4), "count": 3}
    with pytest.raises(CheckpointError) as caught:
        optimizer_shards(optimizer, [local("w", parameter)])
    assert "optimizer/rows/w: a state of [4]" in str(caught.value)
    assert "optimizer/count/w: a state of int" in str(caught.value)


def test_an_optimizer_that_counts_in_its_groups_is_refused_by_name() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    (parameter,) = weights(0)[:1]
    with pytest.raises(CheckpointError) as caught:
        optimizer_shards(Counts([parameter]), [local("w", parameter)])
    assert "Counts changes 'count' of its parameter groups, which are not saved" in str(
        caught.value
    )
