"""Attention on CUDA with those fused kernels of torch that return the log-sum-exp.

FlashAttention-2 takes half precisions with a full or causal mask, and so does cuDNN, which is
faster on Hopper and Blackwell; the memory-efficient kernel takes float32 too, and any mask as a
bias, which is how a band is passed. float64 and modified scores (biases, softcap, dropout) run in
exact blocks.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D width of q, k and v

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.attention import blockwise_attention, fused_attention
from ascend_run.ops.attention.shared_bands import SharedBands
from ascend_run.ops.attention.visibility import BAND_BLOCK, Rectangle, Shape
from ascend_run.plugin_api import AttentionFeatures, AttentionKernel, AttentionResult, AttentionSpec

HALF: Final = (torch.bfloat16, torch.float16)
FLASH_WIDEST: Final = 256
CUDNN_WIDEST: Final = 128
CUDNN_MULTIPLE: Final = 128
"""cuDNN prepares a plan for each pair of lengths. Those of sequences and of a ring's blocks repeat
and are multiples of this; those of documents are not."""
CUDNN_OLDEST: Final = 91501
"""The first version that torch itself prefers."""
CUDNN_CAPABILITIES: Final = (9, 10)
WIDTH_MULTIPLE: Final = 8
"""All kernels read heads in steps of 16 bytes."""
BIAS_MULTIPLE: Final = 16
"""Rows of the memory-efficient kernel's bias start at multiples of this many entries."""
LSE_MULTIPLE: Final = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this many queries."""


class Fused(enum.Enum):
    """torch's fused kernels."""

    CUDNN = enum.auto()
    FLASH = enum.auto()
    EFFICIENT = enum.auto()


def choose(dtype: torch.dtype, width: int, shape: Shape) -> Fused:
    """Return the fastest kernel that supports a rectangle."""
    if dtype in HALF and width <= FLASH_WIDEST and shape is not Shape.BAND:
        return Fused.FLASH
    return Fused.EFFICIENT


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN's kernel is the fastest of this device, as torch decides it."""
    if device.type != "cuda" or (torch.backends.cudnn.version() or 0) < CUDNN_OLDEST:
        return False
    return torch.cuda.get_device_capability(device)[0] in CUDNN_CAPABILITIES


class FusedCudaAttention(AttentionKernel[tuple[()]]):
    """The attention kernel of the CUDA platform.

    Shapes and dtypes: as in the contract; accumulation and log-sum-exp are float32, float64 for
    float64. Numerics: exact softmax (no approximation). A query that sees no key returns zeros, a
    log-sum-exp of -inf (or the sink) and no gradient.

    Args:
        cudnn: Use cuDNN's kernel if the device prefers it and it supports the rectangle.
        flash: Use cuDNN's kernel or FlashAttention-2 if it supports the rectangle.
        in_blocks: Use no fused kernel.
        masks: Shared masks of bands; default: built for each call.
    """

    features = AttentionFeatures.all_but()
    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(
        self,
        *,
        cudnn: bool = True,
        flash: bool = True,
        in_blocks: bool = False,
        masks: SharedBands | None = None,
    ) -> None:
        self.in_blocks = in_blocks
        self._rectangles = _Rectangles(cudnn=cudnn, flash=flash, masks=masks)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[tuple[()]]:
        in_blocks = self._runs_in_blocks(q, spec)
        return AttentionResult(
            *fused_attention.forward(self._rectangles, q, k, v, spec, in_blocks=in_blocks)
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[()],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse = fused_attention.all_given(q, k, v, out, lse)  # see backward_reads
        in_blocks = self._runs_in_blocks(q, spec)
        return fused_attention.backward(
            self._rectangles, dout, q, k, v, out, lse, spec, in_blocks=in_blocks
        )

    def _runs_in_blocks(self, q: Tensor, spec: AttentionSpec) -> bool:
        scores = q.dtype is torch.float64 or blockwise_attention.needs_scores(spec)
        return self.in_blocks or scores


class _Rectangles:
    """ops.attention.pieced_attention.FusedKernel on [B, N, S, D]."""

    sequence_axis = 2
    band_block = BAND_BLOCK

    def __init__(
        self, *, flash: bool, cudnn: bool = False, masks: SharedBands | None = None
    ) -> None:
        self._flash, self._cudnn = flash, cudnn
        self._band = blockwise_attention.band if masks is None else masks.of

    def _bias(self, q: Tensor, k: Tensor, part: Rectangle) -> Tensor | None:
        """Return a band as a bias of the scores, [B, N, S, J]: one matrix for all heads."""
        if part.shape is not Shape.BAND:
            return None
        rows, columns = part.num_queries, part.num_keys
        padded = q.new_zeros(rows, columns + -columns % BIAS_MULTIPLE)
        band = padded[:, :columns].copy_(self._band(part, q))
        return band.expand(*q.shape[:2], rows, columns)

    def _kernel(self, q: Tensor, part: Rectangle) -> Fused:
        chosen = choose(q.dtype, q.shape[-1], part.shape)
        if chosen is Fused.EFFICIENT or not self._flash:
            return Fused.EFFICIENT
        # cuDNN's backward adds in any order.
        is_free = self._cudnn and not torch.are_deterministic_algorithms_enabled()
        fits = q.shape[-1] <= CUDNN_WIDEST and not (
            part.num_queries % CUDNN_MULTIPLE or part.num_keys % CUDNN_MULTIPLE
        )
        return Fused.CUDNN if is_free and fits and prefers_cudnn(q.device) else Fused.FLASH

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """Split a causal rectangle into a square and the queries below, which see all keys.

        A causal rectangle must be square: kernels differ in the corner from which they count.
        """
        if part.shape is not Shape.CAUSAL or part.num_queries <= part.num_keys:
            return (part,)
        middle = part.query_start + part.num_keys
        return (
            Rectangle(part.query_start, middle, part.key_start, part.key_end, Shape.CAUSAL),
            Rectangle(middle, part.query_end, part.key_start, part.key_end, Shape.FULL),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = q.shape[-1]
        q, k, v = (_aligned(t) for t in (q, k, v))
        causal = part.shape is Shape.CAUSAL
        kernel = self._kernel(q, part)
        if kernel is Fused.CUDNN:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            lse = lse.reshape(q.shape[:3])
        elif kernel is Fused.FLASH:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, scale=scale
            )
        else:
            k, v = (_repeated(t, q) for t in (k, v))
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, self._bias(q, k, part), True, 0.0, causal, scale=scale
            )
        return out[..., :width], lse[..., : part.num_queries]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: Rectangle,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width, groups = q.shape[-1], k.shape[1]
        dout, q, k, v, out = (_aligned(t) for t in (dout, q, k, v, out))
        causal = part.shape is Shape.CAUSAL
        kernel, lengths = self._kernel(q, part), (q.shape[2], k.shape[2])
        # Without dropout the random state is unused; the lengths are those of the tensors.
        none = torch.empty((), dtype=torch.int64, device=q.device)
        if kernel is Fused.CUDNN:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(dout, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None),
                *(*lengths, 0.0, causal),
                scale=scale,
            )
        elif kernel is Fused.FLASH:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *(dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, none, none),
                scale=scale,
            )
        else:
            k, v = (_repeated(t, q) for t in (k, v))
            padded = F.pad(lse, (0, -lse.shape[-1] % LSE_MULTIPLE), value=torch.inf)
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                *(dout, q, k, v, self._bias(q, k, part), _by_rows(out), padded, none, none, 0.0),
                [True, True, True, False],
                causal,
                scale=scale,
            )
            dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
        return dq[..., :width], dk[..., :width], dv[..., :width]


def _aligned(x: Tensor) -> Tensor:
    """Pad each head with zeros to the width that the kernels read at a time."""
    missing = -x.shape[-1] % WIDTH_MULTIPLE
    x = F.pad(x, (0, missing)) if missing else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_rows(out: Tensor) -> Tensor:
    """Store the heads of a query one after the other, as the memory-efficient kernel writes them.

    In half precisions its backward reads them so, whatever the strides are.
    """
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _repeated(x_BGJD: Tensor, q: Tensor) -> Tensor:
    """Repeat key-value heads to the number of query heads, for the kernel without GQA support."""
    times = q.shape[1] // x_BGJD.shape[1]
    return x_BGJD if times == 1 else x_BGJD.repeat_interleave(times, dim=1)
