"""Weights of linears in NF4, in place of their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ascend_run.ops.linear.compressed_scales import CompressedScales, dynamic_map
from ascend_run.ops.linear.nf4 import Nf4, byte_values, compress, dequantise, quantise


class Nf4Storage:
    """Store this rank's shards of weights in 4 bits each.

    Implements contracts.WeightStorage. The packed tensors have the names of bitsandbytes'
    ``QuantState``; the tables of values, which it stores with each weight, are held once here.

    Args:
        blocksize: Weights that share a scale.
        use_double_quant: Whether scales have 8 bits each.
    """

    def __init__(self, blocksize: int, device: torch.device, *, use_double_quant: bool) -> None:
        self._block, self._compresses = blocksize, use_double_quant
        self._values = byte_values().to(device)
        self._scale_values = dynamic_map().to(device)

    def pack(self, weight_NK: Tensor) -> Mapping[str, Tensor]:
        """Quantise a shard; see ``nf4.quantise`` for numerics and memory."""
        quantised = quantise(weight_NK, self._block)
        if self._compresses:
            quantised = compress(quantised)
        codes, absmax = quantised.codes_C, quantised.absmax
        if isinstance(absmax, Tensor):
            return {"weight": codes, "absmax": absmax}
        return {
            "weight": codes,
            "absmax": absmax.codes_B,
            "nested_absmax": absmax.absmax_G,
            "nested_offset": absmax.offset,
        }

    def unpack(self, packed: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Dequantise a shard."""
        absmax: Tensor | CompressedScales = packed["absmax"]
        if self._compresses:
            nested, offset = packed["nested_absmax"], packed["nested_offset"]
            absmax = CompressedScales(packed["absmax"], nested, offset, self._scale_values)
        nf4 = Nf4(packed["weight"], absmax, like.shape, self._block, self._values)
        return dequantise(nf4, like.dtype)
