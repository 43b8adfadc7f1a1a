"""Steps with moments in bfloat16, and the stochastic rounding of the second one."""

from __future__ import annotations

import math
import struct
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.optimizer_states import create_states, state_problems
from ascend_run.plugin_api import OptimizerSpec, RunConfig
from ascend_run.plugins.optimizers.o2_bf16_optimizer import (
    O2Bf16Optimizer,
    O2Bf16OptimizerConfig,
    optimizer,
)
from ascend_run.plugins.optimizers.o2_bf16_optimizer.rounding import (
    drawn,
    key_of,
    round_stochastically_,
)
from ascend_run.types.config import OptimizerSection, RunSection
from tests.support.tiny_configs import model_fields, parallel_fields

RATE, DECAY = 0.03, 0.3
BETAS: Final = (0.9, 0.999)
ULP: Final = 2.0**-7
"""Largest distance of two neighbours in bfloat16, relative to the smaller one."""


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec(seed: int = 0, **options: Any) -> OptimizerSpec:
    config = RunConfig(
        model=model_fields(),
        parallel=parallel_fields(),
        optimizer=OptimizerSection(
            lr=RATE, adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=DECAY
        ),
        run=RunSection(seed=seed),
    )
    plugin = O2Bf16Optimizer(O2Bf16OptimizerConfig(**options))
    found: OptimizerSpec = plugin.ascend_optimizer(config=config)
    return found


def stepped(parameters: list[Tensor], gradients: list[list[Tensor]], **options: Any) -> Any:
    """Return the optimizer after a step with each list of gradients."""
    stepping = spec(**options).build([{"params": parameters}])
    for each in gradients:
        for p, gradient in zip(parameters, each, strict=True):
            p.grad = gradient.clone()
        stepping.step()
    return stepping


def test_each_step_is_adamw_of_the_rounded_moments() -> None:
    """In float64 from the moments before the step; the new ones are neighbours of the exact ones,
    the first one the nearest."""
    p = nn.Parameter(draw((40, 50), 0))
    stepping = spec().build([{"params": [p]}])
    ups = 0
    first, second = torch.zeros(40, 50).double(), torch.zeros(40, 50).double()
    for t in range(1, 7):
        before = p.detach().double()
        p.grad = draw((40, 50), t)
        stepping.step()
        g = p.grad.double()
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g * g
        size = (second / (1 - BETAS[1] ** t)).sqrt() + 1e-8
        want = before - RATE * (first / (1 - BETAS[0] ** t) / size + DECAY * before)
        torch.testing.assert_close(p.detach().double(), want, rtol=2e-6, atol=1e-7)
        state = stepping.state[p]
        assert float(state["step"]) == t
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
        m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
        assert ((m - first).abs() <= first.abs() * (ULP / 2) * 1.001 + 1e-9).all()
        assert ((v - second).abs() <= second * ULP * 1.001).all()
        ups += int((v > second).sum())
        first, second = m, v
    assert 0.45 < ups / (6 * p.numel()) < 0.55


def test_elements_are_independent_of_chunks_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: ranges of a parameter, as ranks of a distributed optimizer hold them."""
    whole = nn.Parameter(draw((6, 32), 0))
    parts = [nn.Parameter(x.clone()) for x in whole.detach().view(-1).split([64, 96, 32])]
    gradients = [draw((6, 32), t) for t in range(1, 6)]
    together = stepped([whole], [[g] for g in gradients])
    monkeypatch.setattr(optimizer, "CHUNK", 48)
    apart = stepped(parts, [[*g.view(-1).split([64, 96, 32])] for g in gradients])
    assert torch.equal(whole.view(-1), torch.cat([p.detach() for p in parts]))
    for name in ("exp_avg", "exp_avg_sq"):
        found = torch.cat([apart.state[p][name] for p in parts])
        assert torch.equal(together.state[whole][name].view(-1), found), name


def word(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def folded(x: int, by: int) -> int:
    """``x ^ x >> by`` of a signed 32-bit integer, as whose shift keeps the sign."""
    spread = 2**32 - 2 ** (32 - by) if x >> 31 else 0
    return x ^ (x >> by | spread)


def test_numbers_are_those_of_the_hash() -> None:
    """In Python's integers, modulo 2^32."""
    first, second = draw((500,), 1), draw((500,), 2)
    for step, seed in ((1, 0), (70_001, 123_456_789)):
        found = drawn(first, second, key_of(torch.tensor(float(step)), seed)).tolist()
        key = (step * 0x85EBCA6B + seed * 0x9E3779B1) % 2**32
        for a, b, number in zip(first.tolist(), second.tolist(), found, strict=True):
            x = (word(a) ^ key) * 0x9E3779B1 % 2**32
            x = (folded(x, 15) + word(b)) * 0x85EBCA6B % 2**32
            assert number == folded(x, 13) * 0x9E3779B1 % 2**32 >> 16


@pytest.mark.parametrize("varied", ["parameters", "gradients", "steps", "none but steps"])
def test_numbers_are_uniform(varied: str) -> None:
    """And independent of the numbers of the step before: within four deviations of the counts."""
    count, bins = 1 << 16, 64
    same = torch.full((count,), 0.0123)
    many = draw((count,), 3)
    p = many if varied in ("parameters", "steps") else same
    g = many if varied == "gradients" else torch.zeros(count)
    if varied == "none but steps":
        numbers = torch.cat(
            [drawn(same[:1], g[:1], key_of(torch.tensor(float(t)), 5)) for t in range(count)]
        )
        other = numbers.roll(1)
    else:
        numbers = drawn(p, g, key_of(torch.tensor(8.0), 5))
        other = drawn(p, g, key_of(torch.tensor(9.0), 5))
    expected = count / bins
    for found in (numbers // 1024, (numbers // 8192) * 8 + other // 8192):
        counts = torch.bincount(found.long(), minlength=bins).double()
        assert len(counts) == bins
        assert float((counts - expected).abs().max()) < 4.5 * math.sqrt(expected)


def test_rounding_is_to_a_neighbour_and_right_on_average() -> None:
    values = draw((200_000,), 4) * 1e-3
    numbers = drawn(draw((200_000,), 5), draw((200_000,), 6), key_of(torch.tensor(1.0), 0))
    found = round_stochastically_(values.clone(), numbers)
    assert torch.equal(found, found.bfloat16().float())
    error = found.double() - values.double()
    assert (error.abs() < values.abs() * ULP).all()
    share = error / values.double() / ULP
    assert abs(float(share.mean())) < 4 * float(share.std()) / math.sqrt(len(share))
    exact = found.clone()
    assert torch.equal(round_stochastically_(exact, numbers), found)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    top = torch.full((4,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(
        round_stochastically_(special.clone(), top).view(torch.int32), special.view(torch.int32)
    )


@pytest.mark.parametrize(("start", "gradient"), [(0.0, 1.0), (1.0, 1.2**0.5), (1.0, 0.0)])
def test_the_second_moment_does_not_stall(start: float, gradient: float) -> None:
    """A step changes it by less than half the distance of two neighbours: rounded to the nearest
    value it stays where it is, rounded stochastically it is right on average."""
    steps, count = 1500, 4000
    found = {}
    for stochastic in (True, False):
        p = nn.Parameter(draw((count,), 1))
        stepping = spec(stochastic_rounding=stochastic).build([{"params": [p], "lr": 1e-4}])
        p.grad = torch.zeros(count)
        stepping.step()
        stepping.state[p]["exp_avg_sq"].fill_(start)
        p.grad = torch.full((count,), gradient)
        for _ in range(steps):
            stepping.step()
        found[stochastic] = stepping.state[p]["exp_avg_sq"].double()
    share = BETAS[1] ** steps
    want = share * start + (1 - share) * gradient**2
    spread = float(found[True].std()) / math.sqrt(count)
    assert abs(float(found[True].mean()) - want) < 5 * spread + 2e-3 * want
    assert float(found[False].std()) == 0.0
    stalled = float(found[False].mean())
    assert abs(stalled - want) > 0.1 * max(want, start)
    assert start == 0.0 or stalled == start


def test_states_are_as_declared_before_and_after_the_first_step() -> None:
    declared = spec().states
    parameters = [nn.Parameter(draw(shape, 0)) for shape in ((4, 3), (7,))]
    stepping = spec().build([{"params": parameters}])
    assert create_states(stepping, declared) == []
    assert state_problems(stepping, declared) == []
    fresh = [nn.Parameter(draw((5,), 0))]
    assert state_problems(stepped(fresh, [[draw((5,), 1)]]), declared) == []


def test_a_parameter_without_gradient_has_no_step() -> None:
    left, right = nn.Parameter(draw((3,), 0)), nn.Parameter(draw((3,), 1))
    before = right.detach().clone()
    stepping = spec().build([{"params": [left, right]}])
    left.grad = draw((3,), 2)
    stepping.step()
    assert torch.equal(right, before)
    assert right not in stepping.state


def test_the_seed_of_the_run_determines_the_rounding() -> None:
    gradients = [[draw((300,), t)] for t in (1, 2)]
    found = []
    for seed in (0, 0, 1):
        p = nn.Parameter(draw((300,), 0))
        found.append(stepped([p], gradients, seed=seed).state[p]["exp_avg_sq"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
