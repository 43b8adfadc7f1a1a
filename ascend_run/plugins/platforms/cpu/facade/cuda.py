"""Rows for ``torch.cuda``: device, streams, events, memory, profiler ranges."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .rows import row

if TYPE_CHECKING:
    from ascend_run.plugin_api import Patch
    from ascend_run.plugins.platforms.cpu.memory import HostMemory


class Stream:
    """A queue that is always empty: every operation is complete when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """A timestamp; ``elapsed_time`` is in milliseconds, as on an accelerator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, _stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before elapsed_time is called")
        return 1e3 * (end._seconds - self._seconds)


def nothing() -> Callable[..., None]:
    """Return a function that accepts any arguments and does nothing.

    Each row has its own: torch.compile distinguishes torch's functions by identity.
    """
    return lambda *_args, **_kwargs: None


def call_now(callback: Callable[[], None], **_: Any) -> None:
    """Run a callback at once that CUDA would defer until it is initialized."""
    callback()


def _no_properties(_device: object = None) -> Any:
    """Raise what a torch without CUDA raises."""
    raise AssertionError("the CPU has no properties of a CUDA device")


class _Unchanged(contextlib.ContextDecorator):
    """A reentrant context that changes nothing.

    Contexts of torch.cuda may be entered repeatedly: Megatron enters one twice if several
    distributed optimizers overlap their reductions.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def unchanged() -> Callable[..., _Unchanged]:
    """Return a function that accepts any arguments and returns a no-op context, one per row."""
    return lambda *_args, **_kwargs: _Unchanged()


def cuda_rows(memory: HostMemory) -> tuple[Patch, ...]:
    """Return the rows; ``memory`` backs the memory functions."""
    stream = Stream()

    def current_stream() -> Callable[..., Stream]:
        return lambda _device=None: stream

    def reads(reading: int) -> Callable[..., int]:
        return lambda _device=None: memory.memory_bytes()[reading]

    def memory_stats(_device: object = None) -> dict[str, int]:
        now, peak = memory.memory_bytes()
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        counts = {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.current": 0}
        readings = {"current": now, "peak": peak, "allocated": now, "freed": 0}
        return counts | {f"{k}.all.{n}": value for k in kinds for n, value in readings.items()}

    def reset_peak(_device: object = None) -> None:
        memory.reset_peak_memory()

    names: dict[str, tuple[Any, str]] = {
        "is_available": (lambda: False, "true on a machine with a GPU, which the run does not use"),
        "current_device": (lambda: 0, "passed as device= to factories in Megatron"),
        "set_device": (nothing(), "one device for all ranks"),
        "device_count": (lambda: 1, "ranks are counted per device"),
        "device": (unchanged(), "context of Megatron's RNG functions"),
        "get_device_capability": (lambda _device=None: (0, 0), "kernels are selected by it"),
        "get_device_properties": (_no_properties, "torch.compile reads them; an error: no GPU"),
        "get_device_name": (lambda _device=None: "cpu", "logged"),
        "_lazy_call": (call_now, "queues forever if CUDA is never initialized"),
        "_lazy_init": (nothing(), "raises without CUDA"),
        "init": (nothing(), "raises without CUDA"),
        "synchronize": (nothing(), "timers, schedules and checkpoints call it"),
        "empty_cache": (nothing(), "there is no caching allocator"),
        "Stream": (Stream, "gradient buffers and dispatchers create side streams"),
        "Event": (Event, "timers and dispatchers record them"),
        "stream": (unchanged(), "work is put on side streams"),
        "current_stream": (current_stream(), "side streams wait for it"),
        "default_stream": (current_stream(), "side streams wait for it"),
        "set_stream": (nothing(), "there is one stream"),
        "is_current_stream_capturing": (lambda: False, "graphs are never captured"),
        "memory_allocated": (reads(0), "logged"),
        "memory_reserved": (reads(0), "logged"),
        "max_memory_allocated": (reads(1), "logged"),
        "max_memory_reserved": (reads(1), "logged"),
        "memory_stats": (memory_stats, "logged"),
        "reset_peak_memory_stats": (reset_peak, "readings are taken per step"),
    }
    pushed = {name: nothing() for name in ("range_push", "range_pop", "mark")}
    ranges = {**pushed, "range": unchanged()}
    return (
        *(row(f"torch.cuda:{name}", new, why) for name, (new, why) in names.items()),
        *(
            row(f"torch.cuda.nvtx:{name}", new, "profiler ranges of schedules and layers")
            for name, new in ranges.items()
        ),
    )
