"""Rotary position embedding in one autograd node, alone and fused with the split of q, k and v.

Source: Su et al. 2021, arXiv:2104.09864.
"""

# S sequence on this rank, B batch, N query heads, G key-value heads, D head width,
# R rotated width (at most D)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function


def rotary(x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R of D; pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved.

    ``out = x * cos + rotated_half * sin`` where rotated_half is (-second, first) of each pair.

    Shapes and dtypes: x's; the tables are cast to x's dtype; any strides. Within a torch.compile
    graph it runs ``plain_rotary``, which the compiler fuses; so below.
    """
    if torch.compiler.is_compiling():
        return plain_rotary(x_SBND, cos_SR, sin_SR, interleaved)
    out: Tensor = _Rotary.apply(x_SBND, cos_SR, sin_SR, interleaved)
    return out


def split_qkv_rotary(
    mixed_SBM: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    sizes: tuple[int, int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into q, k and v, and rotate q and k: one pass each way.

    Args:
        mixed_SBM: [S, B, G * (N/G + 2) * D], Megatron's order: for each key-value group its
            queries, its key, its value.
        sizes: G, N/G and D.

    Returns:
        q [S, B, N, D], k and v [S, B, G, D], stored heads first, which attention on the CPU reads
        fastest. The gradient of ``mixed_SBM`` is written into one buffer.
    """
    if torch.compiler.is_compiling():
        return plain_split_qkv_rotary(mixed_SBM, cos_SR, sin_SR, sizes, interleaved)
    outputs: tuple[Tensor, Tensor, Tensor] = _SplitQkvRotary.apply(
        mixed_SBM, cos_SR, sin_SR, sizes, interleaved
    )
    return outputs


def plain_split_qkv_rotary(
    mixed_SBM: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    sizes: tuple[int, int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same by torch operations; stored heads first on the CPU only."""
    parts = split_qkv(mixed_SBM, sizes)
    rotated = [plain_rotary(part, cos_SR, sin_SR, interleaved) for part in parts[:2]]
    q, k, v = (*rotated, parts[2])
    if mixed_SBM.device.type != "cpu":
        return q, k, v
    return _in_order_of_heads(q), _in_order_of_heads(k), _in_order_of_heads(v)


def split_qkv(mixed_SBM: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into q [S, B, N, D], k and v [S, B, G, D]; views where possible."""
    q, k, v = (part.flatten(2, 3) for part in _by_group(mixed_SBM, sizes))
    return q, k, v


def plain_rotary(x: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Compute ``rotary`` by torch operations, differentiated by autograd."""
    width = cos_SR.shape[-1]
    cos, sin = (table.to(x.dtype)[:, None, None] for table in (cos_SR, sin_SR))
    first, second = _pairs(x, width, interleaved)
    rotated_half = torch.stack((-second, first), dim=-1 if interleaved else -2).flatten(-2)
    rotated = x[..., :width] * cos + rotated_half * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def _in_order_of_heads(x_SBND: Tensor) -> Tensor:
    """Copy to the memory order B, N, S, D."""
    return x_SBND.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second of each pair, both [..., R/2]."""
    if interleaved:
        return x[..., :width:2], x[..., 1:width:2]
    half = width // 2
    return x[..., :half], x[..., half:width]


class _Tables(NamedTuple):
    """Cosines and sines, the latter by pair; broadcast over all dims between S and R."""

    width: int
    cos: Tensor
    sin_first: Tensor
    sin_second: Tensor
    interleaved: bool

    @classmethod
    def of(cls, cos_SR: Tensor, sin_SR: Tensor, like: Tensor, interleaved: bool) -> _Tables:
        shape = (like.shape[0], *(1,) * (like.dim() - 2), cos_SR.shape[-1])
        cos, sin = (table.to(like.dtype).reshape(shape) for table in (cos_SR, sin_SR))
        return cls(shape[-1], cos, *_pairs(sin, shape[-1], interleaved), interleaved)

    def rotate(self, x: Tensor, out: Tensor) -> None:
        """Write the rotated x to ``out``."""
        first, second = _pairs(x, self.width, self.interleaved)
        out_first, out_second = self._scaled(x, out)
        out_first.addcmul_(second, self.sin_first, value=-1)
        out_second.addcmul_(first, self.sin_second)

    def rotate_back(self, dy: Tensor, out: Tensor) -> None:
        """Write the gradient of ``rotate``'s input to ``out``."""
        first, second = _pairs(dy, self.width, self.interleaved)
        out_first, out_second = self._scaled(dy, out)
        out_first.addcmul_(second, self.sin_second)
        out_second.addcmul_(first, self.sin_first, value=-1)

    def _scaled(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``x * cos`` and the unrotated part to ``out``, and return its pairs."""
        torch.mul(x[..., : self.width], self.cos, out=out[..., : self.width])
        if x.shape[-1] > self.width:
            out[..., self.width :].copy_(x[..., self.width :])
        return _pairs(out, self.width, self.interleaved)


class _Rotary(Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool
    ) -> Tensor:
        tables = _Tables.of(cos_SR, sin_SR, x_SBND, interleaved)
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.interleaved = interleaved
        out = torch.empty_like(x_SBND, memory_format=torch.contiguous_format)
        tables.rotate(x_SBND, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos_SR, sin_SR = ctx.saved_tensors
        tables = _Tables.of(cos_SR, sin_SR, dy, ctx.interleaved)
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        tables.rotate_back(dy, dx)
        return dx, None, None, None


class _SplitQkvRotary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed_SBM: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        sizes: tuple[int, int, int],
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.sizes, ctx.interleaved = sizes, interleaved
        q, k, v = _by_group(mixed_SBM, sizes)
        tables = _Tables.of(cos_SR, sin_SR, q, interleaved)
        outputs = [_head_by_head(part) for part in (q, k, v)]
        tables.rotate(q, outputs[0])
        tables.rotate(k, outputs[1])
        outputs[2].copy_(v)
        q_out, k_out, v_out = (out.flatten(2, 3) for out in outputs)
        return q_out, k_out, v_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        groups, queries, width = ctx.sizes
        dmixed = dv.new_empty((*dv.shape[:2], groups * (queries + 2) * width))
        dmixed_q, dmixed_k, dmixed_v = _by_group(dmixed, ctx.sizes)
        cos_SR, sin_SR = ctx.saved_tensors
        tables = _Tables.of(cos_SR, sin_SR, dmixed_q, ctx.interleaved)
        tables.rotate_back(dq.unflatten(2, (groups, queries)), dmixed_q)
        tables.rotate_back(dk.unsqueeze(3), dmixed_k)
        dmixed_v.copy_(dv.unsqueeze(3))
        return dmixed, None, None, None, None


def _by_group(mixed_SBM: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [S, B, G, N/G, D], [S, B, G, 1, D], [S, B, G, 1, D] of a projection."""
    groups, queries, width = sizes
    q, k, v = mixed_SBM.unflatten(2, (groups, queries + 2, width)).split((queries, 1, 1), dim=3)
    return q, k, v


def _head_by_head(like_SBGQD: Tensor) -> Tensor:
    """Allocate a tensor of this shape with memory order B, G, Q, S, D."""
    sequence, *middle, width = like_SBGQD.shape
    return like_SBGQD.new_empty((*middle, sequence, width)).movedim(-2, 0)
