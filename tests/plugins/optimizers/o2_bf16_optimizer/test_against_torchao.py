"""The stochastic rounding of the second moment against torchao's, and against its distribution."""

from __future__ import annotations

import math
from typing import Final
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchao.optim.quant_utils import _fp32_to_bf16_sr

from ascend_run.plugins.optimizers.o2_bf16_optimizer.rounding import (
    drawn,
    key_of,
    round_stochastically_,
)

from .test_optimizer import BETAS, DECAY, RATE, draw, spec

SEED: Final = 12_345
STEPS: Final = 20
SHAPE: Final = (40, 50)


def rounded_by_torchao(values: Tensor, numbers: Tensor) -> Tensor:
    """Round with given numbers: torchao rounds away from zero if its number is below the lower 16
    bits of the value, here it is if the sum of both carries."""
    with mock.patch.object(torch, "randint", return_value=0xFFFF - numbers):
        return _fp32_to_bf16_sr(values)


def hashed(parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
    """The numbers of a step, by numpy in 32 bits without sign."""
    golden, murmur = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
    first, second = (x.detach().numpy().view(np.uint32) for x in (parameter, gradient))

    def folded(x: np.ndarray, by: int) -> np.ndarray:
        return x ^ (x.view(np.int32) >> by).view(np.uint32)

    key = np.uint32((step * int(murmur) + SEED * int(golden)) % 2**32)
    x = (folded((first ^ key) * golden, 15) + second) * murmur
    numbers = folded(x, 13) * golden >> np.uint32(16)
    return torch.from_numpy(numbers.astype(np.int32))


def test_bits_are_those_of_torchao() -> None:
    """Of both signs and all exponents, subnormal values, zeros and infinities."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.cat(
        [values[values.isfinite()], torch.tensor([0.0, -0.0, math.inf, -math.inf, 1.0])]
    )
    numbers = torch.randint(2**16, values.shape, generator=generator, dtype=torch.int32)
    for each in (numbers, torch.zeros_like(numbers), torch.full_like(numbers, 0xFFFF)):
        want = rounded_by_torchao(values, each)
        got = round_stochastically_(values.clone(), each).bfloat16()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_states_of_steps_are_those_of_torchao() -> None:
    """Bitwise, weights too: torch's AdamW from moments that torch rounds to the nearest value, and
    torchao at random. So many are rounded up as their distances have it, within 5 deviations."""
    ours = nn.Parameter(draw(SHAPE, 0))
    theirs = nn.Parameter(ours.detach().clone())
    stepping = spec(seed=SEED).build([{"params": [ours]}])
    reference = torch.optim.AdamW(
        [theirs], lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY, fused=True
    )
    ups, expected, variance = 0, 0.0, 0.0
    for t in range(1, STEPS + 1):
        theirs.grad = draw(SHAPE, t) * torch.exp(2 * draw(SHAPE, 100 + t))
        ours.grad = theirs.grad.clone()
        stepping.step()
        reference.step()
        state = reference.state[theirs]
        exact = state["exp_avg_sq"].clone()
        rounded = rounded_by_torchao(exact, hashed(theirs, theirs.grad, t))
        state["exp_avg_sq"].copy_(rounded)
        state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        share = (exact.view(torch.int32) & 0xFFFF).double() / 2**16
        ups += int((rounded > exact).sum())
        expected += float(share.sum())
        variance += float((share * (1 - share)).sum())
        assert torch.equal(ours, theirs)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(stepping.state[ours][name].float(), state[name])
    assert abs(ups - expected) < 5 * math.sqrt(variance)


@pytest.mark.parametrize("numerator", [1, 0x1000, 0x8000, 0xB000, 0xFFFF])
def test_a_value_is_rounded_up_by_its_share(numerator: int) -> None:
    """Otherwise down to the other neighbour: within 5 deviations of a binomial distribution."""
    count = 2**18
    lower, upper = 0x3F80, 0x3F81  # 1 and its next neighbour
    values = torch.full((count,), lower << 16 | numerator, dtype=torch.int32).view(torch.float32)
    numbers = drawn(draw((count,), 1), draw((count,), 2), key_of(torch.tensor(7.0), SEED))
    found = round_stochastically_(values.clone(), numbers).view(torch.int32) >> 16
    assert {*found.unique().tolist()} <= {lower, upper}
    share = numerator / 2**16
    deviation = math.sqrt(count * share * (1 - share))
    assert abs(int((found == upper).sum()) - count * share) < 5 * deviation
