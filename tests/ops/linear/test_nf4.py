"""NF4 against bitsandbytes on a CPU: equal in every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bitsandbytes.functional as peer
import pytest
import torch
from torch import Tensor

from ascend_run.ops.linear import nf4
from ascend_run.ops.linear.compressed_scales import CompressedScales
from ascend_run.ops.linear.nf4 import NF4_VALUES, Nf4, compress, dequantise, quantise
from tests.support.limited_memory import LimitedMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIDPOINTS = (torch.tensor(NF4_VALUES)[:-1] + torch.tensor(NF4_VALUES)[1:]) / 2


def ties(size: int) -> Tensor:
    """Return values of which most are halfway between two codes, in each block beside a 1."""
    return torch.cat([torch.ones(1), MIDPOINTS]).repeat(-(-size // 16))[:size]


def near_ties(size: int) -> Tensor:
    """Return values whose quotient by absmax and whose product with its reciprocal, which differ by
    a ULP, are often on two sides of a midpoint."""
    blocks = -(-size // 64)
    absmax = torch.rand(blocks, 1) + 0.5
    midpoints = MIDPOINTS[torch.randint(15, (blocks, 63))]
    return torch.cat([absmax, absmax * midpoints], dim=1).view(-1)[:size]


KINDS: dict[str, Callable[[int], Tensor]] = {
    "random": torch.randn,
    "outliers": lambda size: torch.randn(size).pow(5),
    "zero": torch.zeros,
    "constant": lambda size: torch.full((size,), -0.3),
    "ties": ties,
    "near-ties": near_ties,
    "one-in-blocks": lambda size: (torch.arange(size) % 100 == 7).float(),
    "denormal": lambda size: torch.randn(size) * 1e-39,
}
SIZES = [1, 2, 63, 64, 65, 127, 640, 705, 256 * 64 + 17]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """bitsandbytes would compile some of its torch operations, which takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def quantised_by_peer(
    weight: Tensor, compressed: bool, block: int = 64
) -> tuple[Tensor, peer.QuantState]:
    return peer.quantize_4bit(
        weight, blocksize=block, quant_type="nf4", compress_statistics=compressed
    )


def dequantised_by_peer(codes: Tensor, state: peer.QuantState, is_subnormal: bool) -> Tensor:
    """Return [N], by its compiled library where it is right.

    Flat, as its AVX-512 kernel takes scales of other blocks for rows that end within a block. In
    float32 first if values are subnormal, which its bfloat16 kernel returns as 0.
    """
    state.shape = torch.Size([state.shape.numel()])
    dtype = state.dtype
    if is_subnormal:
        state.dtype = torch.float32
    return peer.dequantize_4bit(codes.view(-1, 1), state).view(-1).to(dtype)


def assert_equal_to_peer(weight: Tensor, block: int = 64) -> None:
    """Compare codes, scales, compressed scales and dequantised weights, bit for bit."""
    is_subnormal = bool(weight.abs().amax() < 1e-37)
    for compressed in (False, True):
        codes, state = quantised_by_peer(weight, compressed, block)
        ours = quantise(weight, block)
        if compressed:
            ours = compress(ours)
            assert isinstance(ours.absmax, CompressedScales)
            assert torch.equal(ours.absmax.codes_B, state.absmax)
            assert torch.equal(ours.absmax.absmax_G, state.state2.absmax)
            assert torch.equal(ours.absmax.offset, state.offset)
        else:
            assert torch.equal(bits(ours.absmax), bits(state.absmax))
        assert torch.equal(ours.codes_C, codes.view(-1))
        got = dequantise(ours, weight.dtype)
        assert got.shape == weight.shape
        assert got.dtype is weight.dtype
        want = dequantised_by_peer(codes, state, is_subnormal)
        assert torch.equal(bits(got.view(-1)), bits(want))


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits, which tell 0 from -0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def test_the_values_equal_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(NF4_VALUES), peer.get_4bit_type("nf4", device="cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_equal_those_of_bitsandbytes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "CHUNK", 256)  # several chunks, the last one shorter
    for size in SIZES:
        torch.manual_seed(size)
        assert_equal_to_peer(KINDS[kind](size).to(dtype))


@pytest.mark.parametrize("block", nf4.BLOCKS)
def test_each_block_size_equals_that_of_bitsandbytes(block: int) -> None:
    torch.manual_seed(0)
    assert_equal_to_peer(torch.randn(3, 4099), block)


@pytest.mark.parametrize("shape", [(6, 128), (5, 6), (7, 96), (3, 5, 33), (1, 1)], ids=str)
def test_blocks_continue_over_the_ends_of_rows(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_equal_to_peer(torch.randn(shape).bfloat16())


def test_weights_equal_those_of_the_matrix_kernel_of_bitsandbytes() -> None:
    """Its compiled kernel is right where a row is whole blocks, as in most models."""
    torch.manual_seed(0)
    weight = torch.randn(12, 192).bfloat16()
    codes, state = quantised_by_peer(weight, compressed=True)
    got = dequantise(compress(quantise(weight)), torch.bfloat16)
    assert torch.equal(got, peer.dequantize_4bit(codes, state))


def test_a_value_between_two_codes_takes_the_lower_one() -> None:
    """And the next float32 number above it the higher one."""
    for tied in range(15):
        above = MIDPOINTS[tied].nextafter(torch.tensor(1.0))
        weight = torch.stack([torch.tensor(1.0), MIDPOINTS[tied], above, torch.tensor(-1.0)])
        low, high = (int(code) for code in quantise(weight).codes_C)
        assert (low >> 4, low & 15, high >> 4, high & 15) == (15, tied, tied + 1, 0)


def test_quantised_values_are_reproduced_exactly() -> None:
    """A weight of only values that NF4 has, in blocks of other powers of two."""
    torch.manual_seed(0)
    scales = 2.0 ** torch.arange(-4, 4)
    values = torch.tensor(NF4_VALUES)[torch.randint(16, (8, 64))]
    values[:, 0] = 1
    weight = values * scales.unsqueeze(1)
    assert torch.equal(dequantise(quantise(weight), torch.float32), weight)


def test_float64_is_quantised_as_float32_and_read_as_it() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 77, dtype=torch.float64)
    ours = quantise(weight)
    assert torch.equal(ours.codes_C, quantise(weight.float()).codes_C)
    got = dequantise(ours, torch.float64)
    assert got.dtype is torch.float64
    assert torch.equal(got, dequantise(ours, torch.float32).double())


def test_a_view_is_quantised_as_its_copy_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 48, requires_grad=True)
    before = weight.detach().clone()
    got, want = quantise(weight[:, 8:40]), quantise(weight[:, 8:40].contiguous())
    assert torch.equal(got.codes_C, want.codes_C)
    assert torch.equal(got.absmax, want.absmax)
    quantise(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_does_not_disappear(value: float) -> None:
    weight = torch.ones(3 * 64)
    weight[70] = value
    got = dequantise(quantise(weight), torch.float32).isfinite().view(3, 64)
    assert got.all(dim=1).tolist() == got.any(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_more_than_a_chunk_is_converted_at_a_time(dtype: torch.dtype) -> None:
    weight = torch.ones(2**22 + 33, dtype=dtype)
    with LimitedMemory() as memory:
        ours = quantise(weight)
    held = stored_bytes(ours)
    chunk = 4 * nf4.CHUNK
    assert held < memory.peak < held + 4 * chunk < 4 * weight.numel()
    with LimitedMemory() as memory:
        got = dequantise(ours, dtype)
    assert memory.peak < got.nbytes + 4 * chunk < got.nbytes + 4 * weight.numel()


def stored_bytes(ours: Nf4) -> int:
    """Return the bytes of all storages that a quantised tensor holds."""
    tensors = [ours.codes_C, ours.values]
    if isinstance(ours.absmax, CompressedScales):
        scales = ours.absmax
        tensors += [scales.codes_B, scales.absmax_G, scales.offset, scales.values]
    else:
        tensors.append(ours.absmax)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("size", "single", "double"),
    [
        (1, 1 + 4, 1 + 1 + 4 + 4),
        (65, 33 + 2 * 4, 33 + 2 + 4 + 4),
        (257 * 64, 257 * 32 + 257 * 4, 257 * 32 + 257 + 2 * 4 + 4),
        (2**20, 2**19 + 2**16, 2**19 + 2**14 + 2**8 + 4),
    ],
)
def test_bytes_are_half_of_one_each_and_the_scales(size: int, single: int, double: int) -> None:
    """All storages hold no more than those, and the tables."""
    ours = quantise(torch.ones(size))
    assert ours.nbytes == single == stored_bytes(ours) - 2048
    assert compress(ours).nbytes == double == stored_bytes(compress(ours)) - 3072


def test_compressed_scales_are_not_compressed_again() -> None:
    once = compress(quantise(torch.randn(640)))
    assert compress(once) is once


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"NF4 blocks of 48 weights; use one of \(32, 64"):
        quantise(torch.ones(4), block=48)


@pytest.mark.parametrize("weight", [torch.ones(2, 3, dtype=torch.int8), torch.ones(0, 4)], ids=str)
def test_what_has_no_weights_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a weight of shape \(\d, \d\) in torch.* cannot be"):
        quantise(weight)
