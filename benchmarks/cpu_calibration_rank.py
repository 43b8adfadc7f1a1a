"""What a rank of ``cpu_calibration`` does; the ranks find it by its name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

_REDUCED_BYTES: Final = 64 * 2**20
_RUNS: Final = 5
"""After one that warms up."""


def reduction() -> tuple[float, float]:
    """(bytes on the wire in a second, seconds of a message) of an all-reduce of two ranks."""
    import torch
    import torch.distributed as dist

    large, small = torch.zeros(_REDUCED_BYTES // 4), torch.zeros(1)
    wire = _REDUCED_BYTES  # 2 (n - 1) / n of the tensor
    slow, quick = (best(lambda t=t: dist.all_reduce(t), math.inf) for t in (large, small))
    return wire / slow, quick / 2


def best(work: Callable[[], Any], enough: float = 1.0) -> float:
    """Seconds of the fastest of some runs.

    Args:
        enough: No further run begins after so long; ranks that meet in the work must not differ in
            this. Unit: seconds.
    """
    seconds: list[float] = []
    while len(seconds) <= _RUNS and sum(seconds) < enough:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
