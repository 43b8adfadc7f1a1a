"""``python -m benchmarks.cpu_calibration FILE``: this machine as a device for ``plan --device``.

Measures large products in each precision, a copy larger than the caches, and gloo between two
ranks; each is the best of some runs. A minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api.testing.pool import GlooPool

_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WIDTH: Final = 2048
_COPIED_BYTES: Final = 2**30
_REDUCED_BYTES: Final = 64 * 2**20
_RUNS: Final = 4


def machine() -> dict[str, Any]:
    """The fields of ``core.cost.devices.CostDevice``."""
    with GlooPool() as pool:
        bandwidth, latency = pool.run(_reduction, 2, timeout=120)[0]
    return {
        "name": "this machine",
        "flops": {name: _products(dtype) for name, dtype in _PRECISIONS.items()},
        "memory_bandwidth": _copy(),
        "memory_bytes": _memory_bytes(),
        "per_node": 2**20,
        "node_bandwidth": bandwidth,
        "network_bandwidth": bandwidth,
        "latency": latency,
        "reach": 0.63,
        "shared": True,
        "source": "python -m benchmarks.cpu_calibration",
    }


def _products(dtype: str) -> float:
    """FLOP/s of a square product on all cores."""
    import torch

    a, b = (torch.randn(_WIDTH, _WIDTH).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * _WIDTH**3 / _best(lambda: torch.mm(a, b))


def _copy() -> float:
    """Bytes read and written in a second."""
    import torch

    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _best(lambda: target.copy_(source))


def _reduction() -> tuple[float, float]:
    """(bytes on the wire in a second, seconds of a message) of an all-reduce of two ranks."""
    import torch
    import torch.distributed as dist

    large, small = torch.zeros(_REDUCED_BYTES // 4), torch.zeros(1)
    wire = _REDUCED_BYTES  # 2 (n - 1) / n of the tensor
    return wire / _best(lambda: dist.all_reduce(large)), _best(lambda: dist.all_reduce(small)) / 2


def _best(work: Callable[[], Any]) -> float:
    work()
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_calibration")
    parser.add_argument("file", type=Path, help="where to write the device, as JSON")
    path: Path = parser.parse_args(arguments).file
    path.write_text(json.dumps(machine(), indent=2) + "\n")
    print(f"{path}: use it as plan --device {path}")


if __name__ == "__main__":
    main()
