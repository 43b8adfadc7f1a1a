"""Packed weights against torch's products."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ascend_run.ops.linear import packed_linear
from ascend_run.ops.linear.packed_linear import PackedWeight, unavailable
from ascend_run.ops.linear.parallel_linear import LinearCollectives, LinearImplementation

N, K = 40, 24
PACKS = unavailable(torch.float32) is None
"""On this machine."""


@pytest.fixture
def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(N, K), requires_grad=False)


@pytest.mark.parametrize("rows", [0, 1, 16, 37])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_a_packed_weight_are_those_of_torch(
    weight: nn.Parameter, rows: int, has_bias: bool
) -> None:
    x, bias = torch.randn(rows, K), torch.randn(N) if has_bias else None
    want = nn.functional.linear(x, weight, bias)
    packed = PackedWeight(weight)
    assert torch.equal(packed(x, bias), want)
    packed.pack()
    assert (packed.packed is not None) == PACKS
    torch.testing.assert_close(packed(x, bias), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed(x[:, None], bias), want[:, None], rtol=0, atol=1e-5)


def test_the_plain_weight_has_no_memory_and_no_values_left(weight: nn.Parameter) -> None:
    PackedWeight(weight).pack()
    assert weight.shape == (N, K)
    assert weight.untyped_storage().nbytes() == (4 if PACKS else 4 * N * K)
    assert bool(weight.isnan().all()) == PACKS


def test_a_weight_with_other_readers_is_kept(weight: nn.Parameter) -> None:
    before = weight.clone()
    PackedWeight(weight).pack(keep_plain=True)
    assert torch.equal(weight, before)


def test_float64_is_computed_by_torch(weight: nn.Parameter) -> None:
    wide = weight.double()
    packed = PackedWeight(wide)
    packed.pack()
    x = torch.randn(3, K, dtype=torch.float64)
    assert packed.packed is None
    assert torch.equal(packed(x), nn.functional.linear(x, weight.double()))


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_machine_that_cannot_pack_keeps_the_plain_weight(
    weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def reorder(weight: torch.Tensor, rows: int) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no such kernel\nframe #0")
        return weight.roll(1, 0).to_mkldnn()

    monkeypatch.setattr(packed_linear.torch.ops.mkldnn, "_reorder_linear_weight", reorder)
    unavailable.cache_clear()
    try:
        reason = unavailable(torch.float32)
        packed = PackedWeight(weight)
        packed.pack()
    finally:
        unavailable.cache_clear()
    assert reason is not None
    assert ("cannot: no such kernel" if fault == "raises" else "is off by") in reason
    assert packed.packed is None
    assert not weight.isnan().any()


def test_another_weight_of_a_call_is_not_replaced(weight: nn.Parameter) -> None:
    packed = PackedWeight(weight)
    packed.pack()
    other, x = torch.randn(N, K), torch.randn(3, 1, K)
    none = LinearCollectives.NONE
    got = packed_linear._parallel(packed, x, other, none, None, LinearImplementation())
    torch.testing.assert_close(got, nn.functional.linear(x, other), rtol=0, atol=1e-5)


def test_a_row_parallel_product_is_summed_over_the_ranks(
    weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    dist = SimpleNamespace(all_reduce=lambda out, group: seen.append((out.clone(), group)))
    monkeypatch.setattr(packed_linear, "dist", dist)
    packed, x = PackedWeight(weight), torch.randn(3, 1, K)
    want = nn.functional.linear(x, weight)
    packed.pack()
    for kind in (LinearCollectives.COLUMN, LinearCollectives.ROW):
        group: object = "ranks"
        got = packed_linear._parallel(
            packed,
            x,
            weight,
            kind,
            group,  # type: ignore[arg-type]
            LinearImplementation(),
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    ((out, group),) = seen
    assert group == "ranks"
    assert torch.equal(out, got)
