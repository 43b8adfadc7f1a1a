"""Low-rank updates, on numbers that every dtype holds."""

from __future__ import annotations

import math

import pytest
import torch

from ascend_run.ops.linear.low_rank import low_rank_update, scale_of, with_update


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    assert scale_of(5, 2, rslora=False) == 2.5
    assert scale_of(5, 2, rslora=True) == 5 / math.sqrt(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_update_is_computed_in_the_dtype_given(dtype: torch.dtype) -> None:
    a = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0], [129.0]], dtype=torch.bfloat16)
    update = low_rank_update(a, b, 0.5, dtype)
    assert update.dtype is dtype
    assert update.tolist() == [[0.5, 1.0, 1.5], [64.5, 129.0, 193.5]]  # 387 / 2 is no bfloat16


def test_a_sum_is_computed_in_the_dtype_of_the_update() -> None:
    weight = torch.tensor([[1.0], [1.0], [3.0]], dtype=torch.bfloat16)
    # Half a ULP of bfloat16 and a little more, which bfloat16 does not hold.
    update = torch.tensor([[2**-8 + 2**-20], [0.25]], dtype=torch.float32)
    added = with_update(weight, update)
    assert added.dtype is torch.bfloat16
    assert added.tolist() == [[1 + 2**-7], [1.25], [3.0]]
    assert weight.tolist() == [[1.0], [1.0], [3.0]]


def test_rows_get_their_magnitudes_and_others_keep_their_norms() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, update = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    magnitude = torch.tensor([2.0, 0.0, -3.0, 0.5], dtype=torch.float64)
    got = with_update(weight, update[:4], magnitude)
    torch.testing.assert_close(got.norm(dim=1)[[0, 2, 3]], magnitude[[0, 2, 3]].abs())
    assert torch.equal(got[1], weight[1] + update[1])
    assert torch.equal(got[4], weight[4])
    assert torch.equal(got[2].sign(), -(weight[2] + update[2]).sign())
