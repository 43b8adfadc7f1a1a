"""``python -m benchmarks.cpu_calibration``: calibrate the cost model for this machine.

Measures large matmuls in each precision; relative to them, the matmuls of a layer and those in its
attention kernel; a copy larger than the caches; the overhead of an operation; gloo between two
ranks; and copies to a file and back, of a folder on the disk that swapping is to use. Each is the
best of several runs. Takes a minute on two idle cores.

By default it writes ``ascend_run/tools/plan/cost_model/cpu.json``, the device ``cpu`` of the cost
model; with a file name, a device for ``plan --device FILE``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.cost_model.devices import CALIBRATED, CALIBRATION

from .cpu_calibration_rank import best, reduction

_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WIDTH: Final = 2048
_TOKENS: Final = 2048
_LINEARS: Final = ((128, 384), (256, 512), (256, 1024), (512, 1408), (1408, 512))
"""Input and output widths of linears of small models; none is from an example."""
_ATTENTION: Final = (4, 8, 512, 64)
"""Sequences, heads, tokens, head width."""
_BACKWARD: Final = 2.5
"""FLOPs relative to the forward: five matmuls instead of two, since scores are recomputed."""
_COPIED_BYTES: Final = 2**30
_FILE_BYTES: Final = 2**28
_OPERATIONS: Final = 1000


def machine(name: str, folder: Path) -> dict[str, Any]:
    """Measure the fields of ``cost_model.devices.CostDevice``.

    Args:
        folder: On the disk that is measured.
    """
    import torch

    # The ranks that measure gloo have one thread each; everything else uses the whole machine.
    with GlooPool() as pool:
        bandwidth, latency = pool.run(reduction, 2, timeout=120)[0]
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    flops = {precision: _products(dtype) for precision, dtype in _PRECISIONS.items()}
    writes, reads = disk_rates(folder, _FILE_BYTES)
    return {
        "name": name,
        "flops": flops,
        "memory_bandwidth": _copy(),
        "memory_bytes": _memory_bytes(),
        "per_node": 2**20,
        "node_bandwidth": bandwidth,
        "network_bandwidth": bandwidth,
        "latency": latency,
        "reach": {
            precision: min(1.0, _layer_products(dtype) / flops[precision])
            for precision, dtype in _PRECISIONS.items()
        },
        "attention": {
            precision: min(1.0, _attention(dtype) / flops[precision])
            for precision, dtype in _PRECISIONS.items()
        },
        "disk_write_bandwidth": writes,
        "disk_read_bandwidth": reads,
        "operation": _operation(),
        "shared": True,
        "source": f"measured by python -m benchmarks.cpu_calibration, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}: {processor()}, {cores} cores",
    }


def processor() -> str:
    """Return the model name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")


def _products(dtype: str) -> float:
    """FLOP/s of a square matmul on all cores."""
    import torch

    a, b = (torch.randn(_WIDTH, _WIDTH).to(getattr(torch, dtype)) for _ in range(2))
    matmul = _matmul(dtype)
    return 2 * _WIDTH**3 / best(lambda: matmul(a, b))


def _layer_products(dtype: str) -> float:
    """FLOP/s of a layer's matmuls: forward and both gradients."""
    seconds, flops = 0.0, 0
    for columns, rows in _LINEARS:
        for work in _of_a_linear(dtype, columns, rows):
            seconds += best(work)
            flops += 2 * _TOKENS * columns * rows
    return flops / seconds


def _of_a_linear(dtype: str, columns: int, rows: int) -> Iterator[Callable[[], Any]]:
    import torch

    kind, matmul = getattr(torch, dtype), _matmul(dtype)
    x, weight = torch.randn(_TOKENS, columns).to(kind), torch.randn(rows, columns).to(kind)
    gradient = torch.randn(_TOKENS, rows).to(kind)
    yield lambda: matmul(x, weight.t())
    yield lambda: matmul(gradient, weight)
    yield lambda: matmul(gradient.t(), x)


def _matmul(dtype: str) -> Callable[..., Any]:
    """Return the matmul that the platform selects by default; in half precision, torch's."""
    import torch

    from ascend_run.ops.linear.onednn_matmul import onednn_matmul
    from ascend_run.plugins.platforms.cpu.timed_choices import FP32_LINEARS, agreed_choice

    is_onednn = dtype == "float32" and agreed_choice("auto", FP32_LINEARS) == "onednn"
    return onednn_matmul if is_onednn else torch.mm


def _attention(dtype: str) -> float:
    """FLOP/s of a causal attention, forward and backward, counted as the cost model does."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, tokens, width = _ATTENTION
    shape, kind = (batch, heads, tokens, width), getattr(torch, dtype)
    tensors = [torch.randn(shape, dtype=kind, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, dtype=kind)

    def work() -> None:
        scaled_dot_product_attention(*tensors, is_causal=True).backward(gradient)

    pairs = batch * heads * tokens * (tokens + 1) / 2
    return 4 * width * pairs * (1 + _BACKWARD) / best(work)


def _copy() -> float:
    """Bytes read and written per second."""
    import torch

    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / best(lambda: target.copy_(source))


def _operation() -> float:
    """Seconds of an operation on one element, in forward or backward."""
    import torch

    def work() -> None:
        x = torch.ones(1, requires_grad=True)
        y = x
        for _ in range(_OPERATIONS):
            y = y * 1.0
        y.backward()

    return best(work) / (2 * _OPERATIONS)


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second that plugins write to a memory-mapped file until they are on the
    disk, and read from it when none are in memory."""
    import torch

    from ascend_run.ops.transfer.file_copier import FileCopier

    values = torch.ones(nbytes, dtype=torch.uint8)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, nbytes)
        mapped = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
        copier = FileCopier(str(folder))

        def write() -> None:
            copier.to_host(values, mapped)
            os.fsync(descriptor)

        def read() -> None:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            copier.to_device(mapped, values)

        return nbytes / best(write, math.inf), nbytes / best(read, math.inf)


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _rounded(value: Any) -> Any:
    """Round measured values to four digits; more would be noise."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def calibrate(path: Path, folder: Path) -> None:
    """Measure this machine and the disk of a folder, and write the device file."""
    name = CALIBRATED if path == CALIBRATION else "this machine"
    path.write_text(json.dumps(_rounded(machine(name, folder)), indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_calibration",
        description="Measure this machine as a device of the cost model.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=CALIBRATION, help=f"default: {CALIBRATION.name}, "
        "where the cost model finds the device cpu",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="existing folder on the disk to measure; "
        "default: the current one",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    path: Path = options.file
    calibrate(path, options.folder)
    print(f"{path}: plan {'--device cpu' if path == CALIBRATION else f'--device {path}'}")


if __name__ == "__main__":
    main()
