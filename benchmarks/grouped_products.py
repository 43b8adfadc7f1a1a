"""``python -m benchmarks.grouped_products``: how much padding a batched GEMM of groups tolerates.

Prints, for the table ``PADDING_TOLERATED`` of ``ascend_run.ops.experts.grouped_matmul``, the
largest padding at which a batched GEMM is faster than one GEMM for each group and than torch's
grouped GEMM, by dtype and mean number of rows. It takes about a minute on two cores.
"""

# X groups, C mean number of rows of a group, K and N inner and outer width

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ascend_run.ops.experts.grouped_matmul import GROUPS, Backend
from ascend_run.types.moe import GroupedGemm

from .llama import DTYPES
from .protocol import THREADS

GROUPS_TIMED: Final = 64
ROWS: Final = (16, 32, 64, 128)
PADDINGS: Final = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0)
WIDTH: Final = 512
MARGIN: Final = 0.97
"""The batched GEMM must take at most this fraction of the time of the others."""


def counts_of(rows: int, padding: float, groups: int = GROUPS_TIMED) -> list[int]:
    """Return counts with this mean, whose largest is ``padding`` times it; the others are equal
    but for one row."""
    largest = int(rows * padding)
    share, more = divmod(groups * rows - largest, groups - 1)
    return [largest, *[share + 1] * more, *[share] * (groups - 1 - more)]


def tolerated(seconds: dict[float, dict[Backend, float]]) -> float:
    """Return the largest padding up to which the batched GEMM is faster; 0 if it never is.

    Args:
        seconds: By padding, in ascending order, and backend.
    """
    found = 0.0
    for padding, times in seconds.items():
        if times["bmm"] > MARGIN * min(times["loop"], times["grouped_mm"]):
            break
        found = padding
    return found


def measure(
    dtype: torch.dtype, counts: Sequence[int], repeats: int = 7, width: int = WIDTH
) -> dict[Backend, float]:
    """Return the minimum seconds of the three GEMMs of a training step by each backend, which
    alternate."""
    generator = torch.Generator().manual_seed(0)
    rows = (sum(counts), width)
    x, dy, matrices = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in (rows, rows, (len(counts), width, width))
    )
    groups = {name: make(counts, x.device) for name, make in GROUPS.items()}
    times: dict[Backend, list[float]] = {name: [] for name in groups}
    for _ in range(1 + repeats):
        for name, backend in groups.items():
            begin = time.perf_counter()
            _step(backend, x, dy, matrices)
            times[name].append(time.perf_counter() - begin)
    return {name: min(found[1:]) for name, found in times.items()}  # the first one is a warm-up


def _step(groups: GroupedGemm, x: Tensor, dy: Tensor, matrices: Tensor) -> None:
    groups.matmul(x, matrices.transpose(1, 2))
    groups.matmul(dy, matrices)
    groups.outer(dy, x)


def main() -> None:
    torch.set_num_threads(THREADS)
    for name, dtype in DTYPES.items():
        for rows in ROWS:
            seconds = {p: measure(dtype, counts_of(rows, p)) for p in PADDINGS}
            print(f"{name}, up to {rows} rows: {tolerated(seconds):g}", flush=True)
            for padding, times in seconds.items():
                shown = ", ".join(f"{b} {1e3 * t:.1f} ms" for b, t in times.items())
                print(f"  padding {padding:g}: {shown}", flush=True)


if __name__ == "__main__":
    main()
