"""Weights in 4 bits each: NF4, with a scale for every block.

Source: arXiv:2305.14314, sections 2 and 3. Equal in every bit to bitsandbytes 0.50.2 on a CPU:
``quantize_4bit`` (torch operations there), ``quantize_blockwise`` and ``dequantize_4bit`` (its
compiled library). Its AVX-512 kernels of the last differ in two cases, where ours equals its torch
operations: of a weight whose rows are a multiple of 16 but no whole blocks, they take scales of
other blocks; and they return 0 for subnormal bfloat16 values.
"""

# N weights of a flattened tensor, B blocks (N / block, rounded up), C codes (bytes: N / 2, rounded
# up), K weights of a block

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import attrs
import torch
from torch import Tensor

from .compressed_scales import CompressedScales, compress_scales

NF4_VALUES: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What each code stands for, in units of its block's absmax."""
_MIDPOINTS: Final = tuple((low + high) / 2 for low, high in itertools.pairwise(NF4_VALUES))
BLOCKS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CHUNK: Final = 1 << 18
"""Weights that are converted at a time on a CPU, whose intermediates then stay in its cache."""
DEVICE_CHUNK: Final = 1 << 22
"""The same on another device."""
_LEAST_ABSMAX: Final = 1e-38


@attrs.frozen(eq=False)
class Nf4:
    """A quantised tensor.

    Bytes: ceil(N / 2) of codes; of scales 4 * B, or with B scales compressed
    B + 4 * ceil(B / 256) + 4. That is 0.5625 per weight in blocks of 64, and compressed 0.516. The
    tables of values have 2 KiB, and compressed 1 KiB more.
    """

    codes_C: Tensor  #: uint8: two weights in each, the first one in the high bits.
    absmax: Tensor | CompressedScales  #: Largest magnitude in each block, float32 [B].
    shape: torch.Size
    block: int
    values: Tensor
    """The two float32 values of each byte, as the bits of one int64, [256]: a look-up of whole
    elements, without unpacking, is the fastest on a CPU."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, without the tables."""
        held = [self.codes_C]
        if isinstance(self.absmax, CompressedScales):
            held += [self.absmax.codes_B, self.absmax.absmax_G, self.absmax.offset]
        else:
            held.append(self.absmax)
        return sum(tensor.nbytes for tensor in held)


def quantise(weight: Tensor, block: int = 64) -> Nf4:
    """Quantise a tensor in blocks of its flattened values; the last block may be shorter.

    Memory: beside the result, intermediates of one chunk (``CHUNK``, ``DEVICE_CHUNK``). A tensor
    that is not contiguous is copied first, in its dtype.

    Numerics: of two codes that are equally near, the lower one. A block with a value that is not
    finite has no finite value afterwards.

    Args:
        weight: float32, bfloat16, float16, or float64, which is rounded to float32.
        block: Weights that share a scale, one of ``BLOCKS``.

    Raises:
        ValueError: If the block size or the dtype is another one, or the tensor is empty.
    """
    if block not in BLOCKS:
        raise ValueError(f"NF4 blocks of {block} weights; use one of {BLOCKS}")
    if not weight.is_floating_point() or not weight.numel():
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} in {weight.dtype} cannot be quantised to NF4;"
            " it must have values, in a floating-point dtype"
        )
    flat_N = weight.detach().reshape(-1)
    codes_C = flat_N.new_empty(-(-flat_N.numel() // 2), dtype=torch.uint8)
    absmax_B = flat_N.new_empty(-(-flat_N.numel() // block), dtype=torch.float32)
    for part in _chunks(flat_N, block):
        rows_BK = flat_N[part].float().view(-1, block)
        absmax = absmax_B[part.start // block : part.stop // block]
        torch.amax(rows_BK.abs(), dim=1, out=absmax)
        scaled_BK = rows_BK * (1 / absmax.clamp(min=_LEAST_ABSMAX)).unsqueeze(1)
        codes_C[part.start // 2 : part.stop // 2] = _packed(scaled_BK.view(-1))
    full = flat_N.numel() // block * block
    if full < flat_N.numel():
        rest = flat_N[full:].float()
        absmax_B[-1] = rest.abs().amax().clamp(min=_LEAST_ABSMAX)
        codes_C[full // 2 :] = _packed(rest / absmax_B[-1])
    return Nf4(codes_C, absmax_B, weight.shape, block, byte_values().to(weight.device))


def byte_values() -> Tensor:
    """Return ``Nf4.values``, on the CPU."""
    table = torch.tensor(NF4_VALUES, device="cpu")
    return torch.cartesian_prod(table, table).view(torch.int64).view(-1)


def compress(quantised: Nf4) -> Nf4:
    """Return the same codes with scales of 8 bits (double quantisation)."""
    if isinstance(quantised.absmax, CompressedScales):
        return quantised
    return attrs.evolve(quantised, absmax=compress_scales(quantised.absmax))


def dequantise(quantised: Nf4, dtype: torch.dtype) -> Tensor:
    """Return the weights in a dtype; each is a product in float32, rounded once.

    Memory: beside the result, float32 scales and intermediates of one chunk.
    """
    absmax, block = quantised.absmax, quantised.block
    absmax_B = absmax.scales() if isinstance(absmax, CompressedScales) else absmax
    out = absmax_B.new_empty(quantised.shape, dtype=dtype)
    flat_N = out.view(-1)
    for part in _chunks(flat_N, block):
        codes = quantised.codes_C[part.start // 2 : part.stop // 2]
        scales_B1 = absmax_B[part.start // block : part.stop // block].unsqueeze(1)
        torch.mul(_looked_up(codes, quantised.values).view(-1, block), scales_B1,
                  out=flat_N[part].view(-1, block))  # fmt: skip
    full = flat_N.numel() // block * block
    rest = flat_N[full:]
    if len(rest):
        values = _looked_up(quantised.codes_C[full // 2 :], quantised.values)
        torch.mul(values[: len(rest)], absmax_B[-1], out=rest)
    return out


def _chunks(flat_N: Tensor, block: int) -> Iterator[slice]:
    """Yield slices of whole blocks."""
    full = flat_N.numel() // block * block
    size = CHUNK if flat_N.device.type == "cpu" else DEVICE_CHUNK
    for start in range(0, full, size):
        yield slice(start, min(start + size, full))


def _packed(scaled_N: Tensor) -> Tensor:
    """Return two codes in each byte; the high bits have the first one.

    A code is the number of midpoints below a value, which needs no clamp. To count them is faster
    than a search on a CPU, and an operation of every device.
    """
    codes_N = torch.zeros_like(scaled_N, dtype=torch.uint8)
    for midpoint in _MIDPOINTS:
        codes_N += scaled_N > midpoint
    if len(codes_N) % 2:
        codes_N = torch.nn.functional.pad(codes_N, (0, 1), value=NF4_VALUES.index(0.0))
    return codes_N[::2].mul(16).add_(codes_N[1::2])


def _looked_up(codes_C: Tensor, values: Tensor) -> Tensor:
    """Return the values of codes, in units of absmax, float32 [N] or one more."""
    return values.index_select(0, codes_C.int()).view(torch.float32)
