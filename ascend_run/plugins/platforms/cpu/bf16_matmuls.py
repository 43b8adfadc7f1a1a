"""Select the dtype of bfloat16 matmuls: the faster one on this processor.

Processors with bfloat16 matrix units run such matmuls several times as fast as in float32; others,
laptops above all, run them slower than matmuls of float32 copies. No CPU flag shows which applies,
so both are timed once, and the times are cached.
"""

# T rows, K and N inner and outer width

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog
import torch
from torch import distributed as dist

from ascend_run.ops.linear.wide_matmul import Matmul, wide_matmul

from .kept_times import Times, cache_folder, keep_times, kept_times
from .options import BF16_MATMUL_DTYPE

_T, _K, _N = 256, 512, 512
_REPEATS: Final = 4
_MARGIN: Final = 0.9
"""float32 is selected if it takes at most this fraction of the time: a tie keeps bfloat16."""
_LIMITS: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that restrict the instruction sets of torch's libraries."""


@attrs.frozen
class Choice:
    """``bf16`` or ``fp32``, with the reason."""

    dtype: str
    why: str


def agreed_dtype(option: str, measure: Callable[[], Times] | None = None) -> str:
    """Return ``bf16`` or ``fp32``; rank 0 decides for all ranks, since they train one model.

    Must be called on every rank together, since rank 0 broadcasts its choice.

    Args:
        option: ``plugins.cpu.bf16_matmul_dtype``.
        measure: Times both; default: ``measured_times``.
    """
    if option != "auto":
        return option
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    is_fp32 = torch.zeros(1, dtype=torch.int64)
    if alone or dist.get_rank() == 0:
        choice = _own_choice(measure or measured_times)
        structlog.get_logger().info("cpu.bf16_matmul_dtype", dtype=choice.dtype, why=choice.why)
        is_fp32.fill_(choice.dtype == "fp32")
    if not alone:
        dist.broadcast(is_fp32, src=0)
    return "fp32" if is_fp32.item() else "bf16"


def _own_choice(measure: Callable[[], Times]) -> Choice:
    if asked := os.environ.get(BF16_MATMUL_DTYPE):
        return Choice(asked, f"set by {BF16_MATMUL_DTYPE}")
    if torch.are_deterministic_algorithms_enabled():
        return Choice("bf16", "deterministic algorithms: nothing is timed")
    key = processor_key()
    folder = cache_folder()
    times = None if folder is None else kept_times(folder, key)
    if times is not None:
        return Choice(_faster(times), f"{_describe(times)}, timed earlier")
    times = measure()
    try:
        if folder is None:
            raise OSError("no home folder")
        keep_times(folder, key, times)
    except OSError as error:
        structlog.get_logger().warning(
            "cpu.bf16_matmul_dtype_not_kept",
            folder=str(folder),
            reason=str(error),
            fix="set plugins.cpu.bf16_matmul_dtype, or XDG_CACHE_HOME to a folder that can be "
            "written; else the next run times both again and may select the other",
        )
    return Choice(_faster(times), f"{_describe(times)}, timed now")


def _faster(times: Times) -> str:
    return "fp32" if times.fp32 < _MARGIN * times.bf16 else "bf16"


def _describe(times: Times) -> str:
    return f"bf16 {1e3 * times.bf16:.3g} ms, fp32 {1e3 * times.fp32:.3g} ms"


def processor_key() -> dict[str, str]:
    """Return everything that the times depend on, as the cache key."""
    return {
        **dict(_processor()),
        "machine": platform.machine(),
        "system": platform.system(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        **{name: os.environ.get(name, "") for name in _LIMITS},
    }


def _processor() -> Iterator[tuple[str, str]]:
    """Yield the name and the flags of the processor, if the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "CPU part", "Features"):  # the last two: Arm
            yield name.strip(), value.strip()


def measured_times() -> Times:
    """Return the minimum time of a linear's three matmuls in each dtype; takes about 0.2 s.

    The matmuls run on one thread and are timed with its own CPU clock, alternating between dtypes:
    so other load on the machine is not counted, while two threads would wait for each other
    whenever one is preempted.
    """
    # A separate generator: timing must not advance the generator of the run.
    draw = torch.Generator().manual_seed(0)
    x_TK, weight_NK, dy_TN = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((_T, _K), (_N, _K), (_T, _N))
    )

    def seconds(matmul: Matmul) -> float:
        begin = time.thread_time()
        matmul(x_TK, weight_NK.t())
        matmul(dy_TN, weight_NK)
        matmul(dy_TN.t(), x_TK)
        return time.thread_time() - begin

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            rounds = [(seconds(torch.mm), seconds(wide_matmul)) for _ in range(1 + _REPEATS)]
    finally:
        torch.set_num_threads(threads)
    bf16, fp32 = (min(column) for column in zip(*rounds[1:], strict=True))  # the first warms up
    return Times(bf16=bf16, fp32=fp32)
