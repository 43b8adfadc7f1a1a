"""Select how matmuls are computed: the faster way on this processor.

Processors with bfloat16 matrix units run bfloat16 matmuls several times as fast as float32 ones;
others, laptops above all, run them slower than matmuls of float32 copies. And the BLAS behind
``torch.mm`` may be slower in float32 than oneDNN. No CPU flag shows which applies, so both ways are
timed once, and the times are cached. Each kind of work has its own times and its own choice.
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

from .kept_times import Times, cache_folder, keep_times, kept_times
from .options import BF16_MATMUL_DTYPE, DTYPES, FP32_MATMUL_LIBRARY, LIBRARIES
from .work_times import attention_times, library_times, linear_times

_MARGIN: Final = 0.9
"""The other way is selected if it takes at most this fraction of the time: not if they tie."""
_LIMITS: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that restrict the instruction sets of torch's libraries."""


@attrs.frozen
class Work:
    """A kind of work that can be done in two ways."""

    option: str
    """Field of ``CpuOptions`` that fixes the choice; also the name of the log's event."""
    measure: Callable[[], Times]
    """Times the work both ways."""
    names: tuple[str, str] = DTYPES
    """Values of the option: the usual way, and the other."""
    kind: str = "dtype"
    """What the values are, in the log."""
    variable: str = BF16_MATMUL_DTYPE
    """Environment variable that overrides the timing."""


LINEARS: Final = Work("bf16_matmul_dtype", linear_times)
ATTENTION: Final = Work("bf16_attention_dtype", attention_times)
FP32_LINEARS: Final = Work(
    "fp32_matmul_library", library_times, LIBRARIES, "library", FP32_MATMUL_LIBRARY
)


@attrs.frozen
class Choice:
    """One of a work's names, with the reason."""

    name: str
    why: str


def agreed_choice(value: str, work: Work) -> str:
    """Return one of the work's names; rank 0 decides for all ranks, since they train one model.

    Must be called on every rank together, since rank 0 broadcasts its choice.

    Args:
        value: Value of the work's option.
    """
    if value != "auto":
        return value
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    chosen = torch.zeros(1, dtype=torch.int64)
    if alone or dist.get_rank() == 0:
        choice = _own_choice(work)
        logged = {work.kind: choice.name, "why": choice.why}
        structlog.get_logger().info(f"cpu.{work.option}", **logged)
        chosen.fill_(work.names.index(choice.name))
    if not alone:
        dist.broadcast(chosen, src=0)
    return work.names[int(chosen.item())]


def _own_choice(work: Work) -> Choice:
    if asked := os.environ.get(work.variable):
        return Choice(asked, f"set by {work.variable}")
    if torch.are_deterministic_algorithms_enabled():
        return Choice(work.names[0], "deterministic algorithms: nothing is timed")
    key = {**processor_key(), "work": work.option}
    folder = cache_folder()
    times = None if folder is None else kept_times(folder, key)
    if times is not None:
        return Choice(_faster(times, work), f"{_describe(times, work)}, timed earlier")
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
    return Choice(_faster(times, work), f"{_describe(times, work)}, timed now")


def _faster(times: Times, work: Work) -> str:
    return work.names[times.other < _MARGIN * times.usual]


def _describe(times: Times, work: Work) -> str:
    usual, other = work.names
    return f"{usual} {1e3 * times.usual:.3g} ms, {other} {1e3 * times.other:.3g} ms"


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
