"""Scales of 8 bits, against bitsandbytes' compiled library for CPUs."""

from __future__ import annotations

import bitsandbytes.functional as peer
import pytest
import torch
from torch import Tensor

from ascend_run.ops.linear.compressed_scales import (
    CompressedScales,
    code_boundaries,
    compress_scales,
    dynamic_map,
)


def compressed_by_peer(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, absmax and offset as ``quantize_4bit(compress_statistics=True)`` does."""
    offset = scales.mean()
    codes, state = peer.quantize_blockwise(scales - offset, blocksize=256)
    return codes, state.absmax, offset


def parts_of(compressed: CompressedScales) -> tuple[Tensor, Tensor, Tensor]:
    return compressed.codes_B, compressed.absmax_G, compressed.offset


def test_the_dynamic_map_equals_that_of_bitsandbytes() -> None:
    assert torch.equal(dynamic_map(), peer.create_dynamic_map())


def scales_of(kind: str, size: int) -> Tensor:
    torch.manual_seed(size)
    if kind == "constant":
        return torch.full((size,), 0.1)
    if kind == "zero":
        return torch.zeros(size)
    scales = torch.rand(size)
    # Residues whose reciprocal float32 does not hold; far apart; of one magnitude.
    return {"denormal": scales * 1e-39, "spread": scales.pow(30), "random": scales}[kind]


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 5120], ids=str)
@pytest.mark.parametrize("kind", ["random", "spread", "constant", "zero", "denormal"])
def test_compressed_scales_equal_those_of_bitsandbytes(kind: str, size: int) -> None:
    scales = scales_of(kind, size)
    got = compress_scales(scales)
    for ours, theirs in zip(parts_of(got), compressed_by_peer(scales), strict=True):
        assert torch.equal(ours, theirs)
    codes, absmax, offset = parts_of(got)
    want = peer.dequantize_blockwise(codes, absmax=absmax, blocksize=256) + offset
    assert torch.equal(got.scales(), want)


def test_every_boundary_of_codes_is_that_of_bitsandbytes() -> None:
    """Each boundary, the float32 numbers beside it, and numbers everywhere; in groups that have
    a 1, which are thus not scaled."""
    boundaries = code_boundaries(dynamic_map())
    above, below = (boundaries.nextafter(torch.tensor(to)) for to in (1.0, -1.0))
    everywhere = torch.linspace(-1, 1, 2**17)
    values = torch.cat([boundaries, above, below, everywhere])
    values = values[: len(values) // 255 * 255].view(-1, 255)
    groups = torch.cat([torch.ones(len(values), 1), values], dim=1)
    codes, _ = peer.quantize_blockwise(groups, blocksize=256)
    assert torch.equal(torch.bucketize(groups, boundaries).to(torch.uint8), codes)


def test_most_codes_near_zero_are_never_taken() -> None:
    """bitsandbytes rounds to equal steps before it searches the map."""
    boundaries = code_boundaries(dynamic_map())
    assert 240 < boundaries.unique().numel() < 255
    nearest = (dynamic_map()[:-1] + dynamic_map()[1:]) / 2
    assert (boundaries - nearest).abs().amax() <= 1 / 65535 + 2**-24


def test_scales_are_left_as_they_were() -> None:
    scales = torch.rand(300)
    before = scales.clone()
    compressed = compress_scales(scales)
    codes = compressed.codes_B.clone()
    compressed.scales()
    assert torch.equal(scales, before)
    assert torch.equal(compressed.codes_B, codes)
