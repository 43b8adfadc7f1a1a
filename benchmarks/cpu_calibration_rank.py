"""Code that runs on the ranks of ``cpu_calibration``, which import it by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

_REDUCED_BYTES: Final = 64 * 2**20
_RUNS: Final = 5
"""After one warm-up run."""


def reduction() -> tuple[float, float]:
    """Return (bytes on the wire per second, latency in seconds) of an all-reduce of two ranks."""
    import torch
    import torch.distributed as dist

    large, small = torch.zeros(_REDUCED_BYTES // 4), torch.zeros(1)
    wire = _REDUCED_BYTES  # 2 (n - 1) / n of the tensor
    slow, quick = (best(lambda t=t: dist.all_reduce(t), math.inf) for t in (large, small))
    return wire / slow, quick / 2


def best(work: Callable[[], Any], enough: float = 1.0) -> float:
    """Return the seconds of the fastest of several runs.

    Args:
        enough: No further run starts after this time; must be the same on ranks that communicate.
            Unit: seconds.
    """
    seconds: list[float] = []
    while len(seconds) <= _RUNS and sum(seconds) < enough:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
