"""Select the dtype of bfloat16 matmuls: the faster one on this processor.

Processors with bfloat16 matrix units run such matmuls several times as fast as in float32; others,
laptops above all, run them slower than matmuls of float32 copies. No CPU flag shows which applies,
so both are timed once, and the times are cached. The matmuls of a linear and those of attention
are in different libraries, so each kind of work has its own times and its own choice.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog
import torch
from torch import distributed as dist

from .bf16_times import attention_times, linear_times
from .kept_times import Times, cache_folder, keep_times, kept_times
from .options import BF16_MATMUL_DTYPE

_MARGIN: Final = 0.9
"""float32 is selected if it takes at most this fraction of the time: a tie keeps bfloat16."""
_LIMITS: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that restrict the instruction sets of torch's libraries."""


@attrs.frozen
class Work:
    """A kind of bfloat16 work with its own choice of a dtype."""

    option: str
    """Field of ``CpuOptions`` that fixes the choice; also the name of the log's event."""
    measure: Callable[[], Times]
    """Times the work in both dtypes."""


LINEARS: Final = Work("bf16_matmul_dtype", linear_times)
ATTENTION: Final = Work("bf16_attention_dtype", attention_times)


@attrs.frozen
class Choice:
    """``bf16`` or ``fp32``, with the reason."""

    dtype: str
    why: str


def agreed_dtype(value: str, work: Work) -> str:
    """Return ``bf16`` or ``fp32``; rank 0 decides for all ranks, since they train one model.

    Must be called on every rank together, since rank 0 broadcasts its choice.

    Args:
        value: Value of the work's option.
    """
    if value != "auto":
        return value
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    is_fp32 = torch.zeros(1, dtype=torch.int64)
    if alone or dist.get_rank() == 0:
        choice = _own_choice(work)
        structlog.get_logger().info(f"cpu.{work.option}", dtype=choice.dtype, why=choice.why)
        is_fp32.fill_(choice.dtype == "fp32")
    if not alone:
        dist.broadcast(is_fp32, src=0)
    return "fp32" if is_fp32.item() else "bf16"


def _own_choice(work: Work) -> Choice:
    if asked := os.environ.get(BF16_MATMUL_DTYPE):
        return Choice(asked, f"set by {BF16_MATMUL_DTYPE}")
    if torch.are_deterministic_algorithms_enabled():
        return Choice("bf16", "deterministic algorithms: nothing is timed")
    key = {**processor_key(), "work": work.option}
    folder = cache_folder()
    times = None if folder is None else kept_times(folder, key)
    if times is not None:
        return Choice(_faster(times), f"{_describe(times)}, timed earlier")
    times = work.measure()
    try:
        if folder is None:
            raise OSError("no home folder")
        keep_times(folder, key, times)
    except OSError as error:
        structlog.get_logger().warning(
            f"cpu.{work.option}_not_kept",
            folder=str(folder),
            reason=str(error),
            fix=f"set plugins.cpu.{work.option}, or XDG_CACHE_HOME to a folder that can be "
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
