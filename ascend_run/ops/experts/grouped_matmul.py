"""Grouped GEMM: each group of rows has its own matrix.

Rows are sorted by group. Counts are host integers; implementations that need no slices also take
them as a tensor on the device. Either way nothing synchronises with the device.

Source: the grouped GEMM of MegaBlocks, arXiv:2211.15841, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.linear.wide_matmul import wide_matmul
from ascend_run.types.moe import GroupedGemm

from .grouped_widths import row_elements

# T rows of all groups, X groups, K and N inner and outer widths of the matrices, C rows of the
# largest group

Backend = Literal["grouped_mm", "bmm", "loop"]
NATIVE_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that torch's grouped GEMM supports on the CPU; on CUDA it is fast in bfloat16 only."""
MANY_GROUPS: Final = 16
"""From this many groups on, the overhead of one call a group is noticeable, and a batched GEMM is
faster if possible."""
PADDING_TOLERATED: Final = {
    2: ((16.0, 2.0), (32.0, 1.25), (math.inf, 1.0)),
    4: ((16.0, 1.25),),
}
"""By bytes of an element: up to this mean of the groups' rows, a batched GEMM of groups padded to C
rows is faster on the CPU if C is at most so many times the mean. ``python -m
benchmarks.grouped_products`` measures it; see docs/plugins/experts/gmm.md."""
BALANCED: Final = 1.1
"""The same ratio elsewhere, for any mean."""


Counts = Sequence[int] | Tensor
"""Rows of each group: on the host, or an int64 tensor [X] on the device."""


def on_host(counts: Counts) -> list[int]:
    """Return the counts as integers; reading a tensor synchronises with its device."""
    entries: list[int] = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    return entries


class LoopGroups:
    """One GEMM per group, written into the output; any dtype, exact in float64."""

    mm = staticmethod(torch.mm)

    def __init__(self, counts: Counts, device: torch.device) -> None:
        self.counts = on_host(counts)

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        y_TN = x_TK.new_empty(x_TK.shape[0], matrices_XKN.shape[2])
        parts = zip(
            x_TK.split(self.counts), matrices_XKN.unbind(0), y_TN.split(self.counts), strict=True
        )
        for x, matrix, y in parts:
            self.mm(x, matrix, out=y)
        return y_TN

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        products = a_TN.new_empty(len(self.counts), a_TN.shape[1], b_TK.shape[1])
        parts = zip(
            a_TN.split(self.counts), b_TK.split(self.counts), products.unbind(0), strict=True
        )
        for a, b, product in parts:
            self.mm(a.t(), b, out=product)
        return products

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        """Add in place; to a sum of another dtype by way of one product, which stays cached."""
        product = None if sum_XNK.dtype is a_TN.dtype else a_TN.new_empty(sum_XNK.shape[1:])
        parts = zip(
            a_TN.split(self.counts), b_TK.split(self.counts), sum_XNK.unbind(0), strict=True
        )
        for a, b, total in parts:
            if product is None:
                total.addmm_(a.t(), b)
            else:
                total.add_(self.mm(a.t(), b, out=product))


class WideGroups(LoopGroups):
    """LoopGroups whose bfloat16 matmuls run in float32."""

    mm = staticmethod(wide_matmul)


class NativeGroups:
    """torch's grouped GEMM: one call; operands must be contiguous."""

    counts_on_device = True

    def __init__(self, counts: Counts, device: torch.device) -> None:
        self.counts = counts
        if isinstance(counts, Tensor):
            self.ends = counts.cumsum(0, dtype=torch.int32)
            return
        self.ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(
            device, non_blocking=True
        )

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        return F.grouped_mm(x_TK.contiguous(), matrices_XKN, offs=self.ends)

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        return F.grouped_mm(a_TN.contiguous().t(), b_TK.contiguous(), offs=self.ends)

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        if a_TN.device.type == "cpu":
            LoopGroups(self.counts, a_TN.device).add_outer(sum_XNK, a_TN, b_TK)
        else:
            sum_XNK.add_(self.outer(a_TN, b_TK))  # torch's cannot accumulate into a sum


class PaddedGroups:
    """One batched GEMM over groups padded to the largest; a view if they are equal."""

    def __init__(self, counts: Counts, device: torch.device) -> None:
        self.counts = counts = on_host(counts)
        self.num_groups, self.rows = len(counts), max(counts)
        self.places: Tensor | None = None
        if min(counts) < self.rows:
            per_group = torch.tensor(counts)
            shifts = torch.arange(len(counts)) * self.rows - (per_group.cumsum(0) - per_group)
            places = torch.arange(sum(counts)) + shifts.repeat_interleave(per_group)
            self.places = places.to(device, non_blocking=True)

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        padded = torch.bmm(self._pad(x_TK), matrices_XKN).flatten(0, 1)
        return padded if self.places is None else padded.index_select(0, self.places)

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        return torch.bmm(self._pad(a_TN).transpose(1, 2), self._pad(b_TK))

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        if sum_XNK.dtype is a_TN.dtype:
            sum_XNK.baddbmm_(self._pad(a_TN).transpose(1, 2), self._pad(b_TK))
        elif a_TN.device.type == "cpu":
            LoopGroups(self.counts, a_TN.device).add_outer(sum_XNK, a_TN, b_TK)
        else:
            sum_XNK.add_(self.outer(a_TN, b_TK))

    def _pad(self, x: Tensor) -> Tensor:
        """Reshape or pad [T, K] to [X, C, K]."""
        if self.places is not None:
            padded = x.new_zeros(self.num_groups * self.rows, x.shape[1])
            x = padded.index_copy_(0, self.places, x)
        return x.view(self.num_groups, self.rows, x.shape[1])


MakeGroups = Callable[[Counts, torch.device], GroupedGemm]
GROUPS: Final[dict[Backend, MakeGroups]] = {
    "grouped_mm": NativeGroups,
    "bmm": PaddedGroups,
    "loop": LoopGroups,
}


def native_takes(device_type: str, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Return whether torch's grouped GEMM supports these operands and is fast.

    Args:
        widths: K and N of every GEMM; their rows must be multiples of 16 bytes.
    """
    if any(width % row_elements(dtype.itemsize) for width in widths):
        return False
    if device_type == "cuda":
        return dtype is torch.bfloat16
    return device_type == "cpu" and dtype in NATIVE_DTYPES


def choose(
    counts: Sequence[int], device: torch.device, dtype: torch.dtype, widths: Sequence[int]
) -> Backend:
    """Return the fastest backend for these shapes; measured, see docs/plugins/experts/gmm.md.

    On the CPU a batched GEMM saves the overhead of separate calls, which matters for groups of few
    rows, and costs the padding.
    """
    total, largest, on_cpu = sum(counts), max(counts, default=0), device.type == "cpu"
    if total == 0:
        return "loop"
    mean = total / len(counts)
    if on_cpu and len(counts) >= MANY_GROUPS and largest <= mean * _padding(dtype, mean):
        return "bmm"
    if not (on_cpu and dtype is torch.float32) and native_takes(device.type, dtype, widths):
        return "grouped_mm"
    return "bmm" if not on_cpu and largest <= BALANCED * mean else "loop"


def _padding(dtype: torch.dtype, mean: float) -> float:
    """Return what ``PADDING_TOLERATED`` has for this mean; 0 if it has nothing."""
    table = PADDING_TOLERATED.get(dtype.itemsize, ())
    return next((padding for rows, padding in table if mean <= rows), 0.0)


class _GroupedMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, matrices_XNK: Tensor, groups: GroupedGemm) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(x_TK if ctx.needs_input_grad[1] else None, matrices_XNK)
        return groups.matmul(x_TK, matrices_XNK.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TK, matrices_XNK = ctx.saved_tensors
        dx = ctx.groups.matmul(dy_TN, matrices_XNK) if ctx.needs_input_grad[0] else None
        dw = ctx.groups.outer(dy_TN, x_TK) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def grouped_matmul(
    x_TK: Tensor, matrices_XNK: Tensor, counts: Sequence[int], backend: Backend | None = None
) -> Tensor:
    """Compute ``x @ matrix.T`` with the matrix of each row's group, [T, N]; differentiable in both.

    Args:
        counts: Rows of each group, on the host; they sum to T. A count may be 0; that group's
            matrix then has a gradient of zeros.
        backend: Default: ``choose``.

    Numerics: each backend has the reduction order of its GEMM; ``loop`` is torch.mm of each group.
    """
    if backend is None:
        backend = choose(counts, x_TK.device, x_TK.dtype, matrices_XNK.shape[1:])
    out: Tensor = _GroupedMatmul.apply(x_TK, matrices_XNK, GROUPS[backend](counts, x_TK.device))
    return out
