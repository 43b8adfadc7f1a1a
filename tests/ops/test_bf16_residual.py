"""Float32 values come back from bfloat16 and a residual with every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops import bf16_residual
from ascend_run.ops.bf16_residual import ASIDE_SHARE, Bf16Residual

HALVES = 1 << 16
LOW = (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)
"""Low halves at which the rounding changes; more are drawn."""


def values_of(bits: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def bits_of(values: Tensor) -> NDArray[np.uint32]:
    return values.numpy().view(np.uint32)


def rounded_bits(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bits of bfloat16 by integers: to nearest, ties to even. Not of NaN."""
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint32)


def split(values: Tensor) -> tuple[Tensor, Bf16Residual]:
    rounded = torch.zeros(values.shape, dtype=torch.bfloat16)
    residual = Bf16Residual(rounded)
    residual.split(values, rounded)
    return rounded, residual


def joined(rounded: Tensor, residual: Bf16Residual) -> Tensor:
    out = torch.full(rounded.shape, torch.nan)
    residual.join(rounded, out)
    return out


def test_every_high_half_with_every_kind_of_low_half_comes_back() -> None:
    """All signs and exponents: zeros, subnormal numbers, infinities and NaNs."""
    drawn = np.random.default_rng(0).integers(0, HALVES, 6)
    high = np.arange(HALVES, dtype=np.uint32) << 16
    bits = np.concatenate([high | np.uint32(low) for low in (*LOW, *drawn)])
    rounded, residual = split(values_of(bits))
    assert np.array_equal(bits_of(joined(rounded, residual)), bits)
    number = ~np.isnan(bits.view(np.float32))
    found = rounded.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(found[number], rounded_bits(bits)[number])
    ties = ((bits & 0x1FFFF) == 0x8000) & number
    assert ties.sum() <= residual.num_aside <= ties.sum() + (~number).sum()


def test_a_low_half_of_every_value_comes_back_at_some_high_halves() -> None:
    low = np.arange(HALVES, dtype=np.uint32)
    for high in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x8000, 0xBF80, 0xFF7F, 0xFFFF):
        bits = (np.uint32(high) << 16) | low
        rounded, residual = split(values_of(bits))
        assert np.array_equal(bits_of(joined(rounded, residual)), bits)


def test_ties_that_are_rounded_down_are_kept_aside() -> None:
    """Those that are rounded up are not, although their low half is the same."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0xBF818000] * 20, np.uint32)
    rounded, residual = split(values_of(bits[:5].repeat(20)))
    assert residual.nbytes == 4 * 100, "too many ties: kept whole"
    bits = np.concatenate([bits[:5], np.full(95, 0x3F900001, np.uint32)])
    rounded, residual = split(values_of(bits))
    assert residual.num_aside == 2
    assert residual.nbytes == 2 * 100 + 12 * 2
    assert np.array_equal(bits_of(joined(rounded, residual)), bits)
    assert rounded[0] == rounded[2].item() - 2.0**-7
    assert rounded[1] == rounded[0] + 2.0**-6


def test_one_value_in_2_to_17_is_kept_aside() -> None:
    numel = 1 << 22
    bits = np.random.default_rng(1).integers(0, 1 << 32, numel, dtype=np.uint32)
    bits = (bits & 0x807FFFFF) | 0x3F000000  # no NaN
    rounded, residual = split(values_of(bits))
    assert np.array_equal(bits_of(joined(rounded, residual)), bits)
    expected = ASIDE_SHARE * numel
    assert abs(residual.num_aside - expected) < 5 * expected**0.5
    assert residual.nbytes == 2 * numel + 12 * residual.num_aside


def test_values_are_read_at_positions() -> None:
    bits = np.array([0x3F808000, 0x3F818001, 0x00008000, 0xC0490FDB] + [0x3F900001] * 40, np.uint32)
    rounded, residual = split(values_of(bits))
    assert residual.num_aside == 2
    for where in ([3, 0, 2], [2], [1, 43], []):
        found = residual.values_at(rounded, torch.tensor(where, dtype=torch.int64))
        assert np.array_equal(bits_of(found), bits[where])
    diverged = torch.full((8,), torch.nan)
    diverged[3] = 1.5
    rounded, residual = split(diverged)
    assert residual.values_at(rounded, torch.tensor([3])).item() == 1.5


def test_a_new_residual_is_that_of_rounded_values() -> None:
    rounded = torch.randn(33, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(joined(rounded, Bf16Residual(rounded)), rounded.float())


def test_a_residual_is_used_again_after_a_divergence() -> None:
    """Of NaNs only; then of numbers."""
    rounded = torch.zeros(40, dtype=torch.bfloat16)
    residual = Bf16Residual(rounded)
    odd = torch.from_numpy(np.full(40, 0x7F800001, np.uint32).view(np.float32))
    for values in (torch.randn(40), odd, torch.randn(40)):
        residual.split(values, rounded)
        assert np.array_equal(bits_of(joined(rounded, residual)), bits_of(values))
    assert residual.nbytes == 80


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 17, 24])
def test_blocks_need_not_divide_the_elements(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 8), ("DEVICE_BLOCK", 12), ("_ROW", 4)):
        monkeypatch.setattr(bf16_residual, name, value)
    bits = np.random.default_rng(numel).integers(0, 1 << 32, numel, dtype=np.uint32)
    bits[::9] = 0x3F808000
    rounded, residual = split(values_of(bits))
    assert np.array_equal(bits_of(joined(rounded, residual)), bits)


class Reads(TorchDispatchMode):
    """Counts the operations for which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in ("nonzero", "_local_scalar_dense", "masked_select")
        return func(*args, **(kwargs or {}))


def test_the_host_waits_twice_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_residual, "BLOCK", 1024)
    bits = np.random.default_rng(2).integers(0, 1 << 32, 5000, dtype=np.uint32) & 0xBFFFFFFF
    bits[[0, 700, 1025, 4999]] = 0x3F808000
    rounded = torch.zeros(5000, dtype=torch.bfloat16)
    residual = Bf16Residual(rounded)
    values = values_of(bits)
    with Reads() as reads:
        residual.split(values, rounded)
    assert reads.count == 2
    assert residual.num_aside >= 4
    assert np.array_equal(bits_of(joined(rounded, residual)), bits)
