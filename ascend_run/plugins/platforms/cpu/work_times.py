"""Time work of a training step in two ways: bfloat16 in bfloat16 and in float32, and float32 by
``torch.mm`` and by oneDNN.

The work runs on one thread and is timed with its own CPU clock, alternating between both: so
other load on the machine is not counted, while two threads would wait for each other whenever one
is preempted.
"""

# T rows, K and N inner and outer width; S sequence, B batch, H heads, D head width

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ascend_run.ops.linear.onednn_matmul import onednn_matmul
from ascend_run.ops.linear.wide_matmul import Matmul, wide_matmul
from ascend_run.types.attention import AttentionSpec

from .attention import FusedCpuAttention
from .kept_times import Times

_T, _K, _N = 256, 512, 512
_S, _B, _H, _D = 256, 2, 2, 64
_REPEATS: Final = 4


def linear_times() -> Times:
    """Return the minimum time of a bfloat16 linear's three matmuls in each dtype; takes about 0.2
    s."""
    return _linear_times(torch.bfloat16, wide_matmul)


def library_times() -> Times:
    """Return the same times of a float32 linear by ``torch.mm`` and by oneDNN."""
    return _linear_times(torch.float32, onednn_matmul)


def _linear_times(dtype: torch.dtype, other: Matmul) -> Times:
    """Time ``torch.mm`` and another matmul."""
    x_TK, weight_NK, dy_TN = (x.to(dtype) for x in _drawn((_T, _K), (_N, _K), (_T, _N)))

    def matmuls(matmul: Matmul) -> None:
        matmul(x_TK, weight_NK.t())
        matmul(dy_TN, weight_NK)
        matmul(dy_TN.t(), x_TK)

    return _timed(lambda: matmuls(torch.mm), lambda: matmuls(other))


def attention_times() -> Times:
    """Return the minimum time of the backward of causal attention in each dtype; takes about 0.1 s.

    The forward is as fast in bfloat16 and in float32 and always runs in bfloat16.
    """
    q, k, v, dout = _drawn(*[(_S, _B, _H, _D)] * 4)
    spec = AttentionSpec(scale=_D**-0.5)
    plain, wide = FusedCpuAttention(), FusedCpuAttention(wide_backward=True)
    result = plain.forward(q, k, v, spec)
    inputs = (dout, q, k, v, result.out, result.lse, (), spec)
    return _timed(lambda: plain.backward(*inputs), lambda: wide.backward(*inputs))


def _drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    # A separate generator: timing must not advance the generator of the run.
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]


def _timed(usual: Callable[[], object], other: Callable[[], object]) -> Times:
    def seconds(work: Callable[[], object]) -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            rounds = [(seconds(usual), seconds(other)) for _ in range(1 + _REPEATS)]
    finally:
        torch.set_num_threads(threads)
    best_usual, best_other = (min(column) for column in zip(*rounds[1:], strict=True))  # 1: warm-up
    return Times(usual=best_usual, other=best_other)
