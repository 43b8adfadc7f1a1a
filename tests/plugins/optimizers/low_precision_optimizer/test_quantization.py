"""The 8-bit values, and blocks that are quantized and dequantized."""

from __future__ import annotations

import bisect
from typing import Final

import pytest
import torch
from torch import Tensor

from ascend_run.plugins.optimizers.low_precision_optimizer.parameters import TABLE_BYTES
from ascend_run.plugins.optimizers.low_precision_optimizer.quantization import (
    Quantizer,
    dynamic_values,
)

BLOCK: Final = 256
CPU: Final = torch.device("cpu")
NUM_VALUES: Final = {
    "mixed": 1000,
    "one block": 256,
    "short": 7,
    "one": 1,
    "many": 256 * 37 + 255,
}


def tree(*, signed: bool) -> list[float]:
    """The values as the paper describes them, from their bits: a sign, then zeros that count the
    decade, a one, and a fraction of evenly spaced steps."""
    bits = 7 if signed else 8
    found = {0.0, 1.0}
    for zeros in range(7):
        fraction_bits = bits - 1 - zeros
        steps = 2**fraction_bits
        for fraction in range(steps):
            value = 10.0**-zeros * (0.1 + 0.9 * (2 * fraction + 1) / (2 * steps))
            found |= {value, -value} if signed else {value}
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_those_of_the_dynamic_tree(signed: bool) -> None:
    found = dynamic_values(signed=signed)
    assert len(found) == len({*found}) == 256
    assert found == sorted(found)
    assert found == pytest.approx(tree(signed=signed), rel=1e-12, abs=1e-15)


def draw(numel: int, seed: int, *, signed: bool) -> Tensor:
    """Values of many magnitudes, also within a block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(numel, generator=generator) * 4)
    values = torch.randn(numel, generator=generator) * sizes * 1e-4
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", NUM_VALUES.values(), ids=NUM_VALUES)
def test_each_element_has_the_code_of_the_nearest_value(signed: bool, numel: int) -> None:
    """By a search in Python, in each block from its own scale."""
    wide = draw(numel, numel, signed=signed)
    codes, scales = Quantizer(signed=signed, device=CPU).quantized(wide)
    values = tree(signed=signed)
    assert codes.dtype is torch.uint8
    assert codes.shape == wide.shape
    assert scales.shape == (-(-numel // BLOCK),)
    for block, scale in enumerate(scales.tolist()):
        held = wide[block * BLOCK : (block + 1) * BLOCK].tolist()
        assert scale == max(held, key=abs)
        found = codes[block * BLOCK : (block + 1) * BLOCK].tolist()
        for value, code in zip(held, found, strict=True):
            unit = value / scale
            at = bisect.bisect(values, unit)
            near = [c for c in (at - 1, at) if 0 <= c < 256]
            distance = {c: abs(values[c] - unit) for c in near}
            assert distance[code] <= min(distance.values()) * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", NUM_VALUES.values(), ids=NUM_VALUES)
def test_dequantized_values_have_the_same_codes_and_scales(signed: bool, numel: int) -> None:
    """Bitwise: so a checkpoint in float32 loses nothing."""
    quantizer = Quantizer(signed=signed, device=CPU)
    wide = draw(numel, numel + 1, signed=signed)
    codes, scales = quantizer.quantized(wide)
    values = quantizer.dequantized(codes, scales)
    again = quantizer.quantized(values)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert torch.equal(quantizer.dequantized(*again), values)


def test_a_block_of_negative_values_keeps_its_largest_one() -> None:
    wide = torch.tensor([-3.0, 2.5, -0.001, 0.0])
    quantizer = Quantizer(signed=True, device=CPU)
    codes, scales = quantizer.quantized(wide)
    assert scales.tolist() == [-3.0]
    values = quantizer.dequantized(codes, scales)
    assert values.tolist() == pytest.approx([-3.0, 2.5, -0.001, 0.0], rel=0.15)
    assert float(values[0]) == -3.0


def test_all_codes_survive_with_scales_of_any_size() -> None:
    """Down to the size below which a block is zero."""
    for signed in (True, False):
        quantizer = Quantizer(signed=signed, device=CPU)
        every = torch.arange(256, dtype=torch.uint8)
        for exponent in (-100, -60, -10, 0, 30, 127):
            scales = torch.tensor([1.37 * 2.0**exponent])
            values = quantizer.dequantized(every, scales)
            codes, found = quantizer.quantized(values)
            assert torch.equal(codes, every)
            assert torch.equal(found, scales)


def test_zeros_and_tiny_values_become_zeros() -> None:
    for signed in (True, False):
        quantizer = Quantizer(signed=signed, device=CPU)
        for wide in (torch.zeros(300), torch.full((300,), 2.0**-101)):
            codes, scales = quantizer.quantized(wide)
            assert scales.tolist() == [0.0, 0.0]
            assert torch.equal(quantizer.dequantized(codes, scales), torch.zeros(300))
            assert torch.equal(quantizer.quantized(torch.zeros(300))[0], codes)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7F800000], ids=hex)
@pytest.mark.parametrize("signed", [True, False])
def test_a_block_that_has_diverged_stays_so(signed: bool, bits: int) -> None:
    """NaNs of both signs and an infinity; the next block is not concerned."""
    quantizer = Quantizer(signed=signed, device=CPU)
    wide = draw(512, 0, signed=signed)
    wide[3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    values = quantizer.dequantized(*quantizer.quantized(wide))
    assert not values[:256].isfinite().any()
    alone = quantizer.dequantized(*quantizer.quantized(wide[256:]))
    assert torch.equal(values[256:], alone)


@pytest.mark.parametrize("signed", [True, False])
def test_values_on_both_sides_of_each_border_have_its_codes(signed: bool) -> None:
    """Next to it, and on it; in blocks of the scale 1."""
    quantizer = Quantizer(signed=signed, device=CPU)
    exact = torch.tensor(tree(signed=signed), dtype=torch.float64)
    borders = ((exact[1:] + exact[:-1]) / 2).float()
    one, zero = torch.tensor(1.0), torch.tensor(-1.0 if signed else 0.0)
    below, above = torch.nextafter(borders, zero), torch.nextafter(borders, one)
    for values, shift in ((below, 0), (borders, 1), (above, 1)):
        wide = torch.cat([values, one.view(1)])
        codes, scales = quantizer.quantized(wide)
        assert scales.tolist() == [1.0]
        assert codes[:-1].tolist() == [at + shift for at in range(255)]


def test_plan_counts_the_tables_of_both_moments() -> None:
    quantizers = [Quantizer(signed=signed, device=CPU) for signed in (True, False)]
    tables = [t for one in quantizers for t in vars(one).values() if isinstance(t, Tensor)]
    assert sum(table.untyped_storage().nbytes() for table in tables) == TABLE_BYTES
