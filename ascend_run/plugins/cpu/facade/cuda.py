"""Rows on ``torch.cuda``: device, streams, events, memory, profiler ranges."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .substitution import Substitute

if TYPE_CHECKING:
    from ascend_run.plugins.cpu.device import CpuDevice


class Stream:
    """A queue that is always empty: every operation is done when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, _stream: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

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
    """A point in time; ``elapsed_time`` is in milliseconds, as on an accelerator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, _stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, _stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return 1e3 * (end._seconds - self._seconds)


def nothing() -> Callable[..., None]:
    """A function that accepts anything and does nothing.

    Each row has its own: torch.compile tells torch's functions apart by identity.
    """
    return lambda *_args, **_kwargs: None


def call_now(callback: Callable[[], None], **_: Any) -> None:
    """What is put off until CUDA starts, done at once."""
    callback()


def _no_properties(_device: Any = None) -> Any:
    """What torch itself raises where it was built without CUDA."""
    raise AssertionError("the CPU has no properties of a CUDA device")


@contextlib.contextmanager
def _entered(*_: Any, **__: Any) -> Iterator[None]:
    """A context that changes nothing."""
    yield


def cuda_substitutes(device: CpuDevice) -> tuple[Substitute, ...]:
    """The rows; ``device`` answers what is asked about memory."""
    cpu = torch.device("cpu")
    stream = Stream()

    def current_stream() -> Callable[..., Stream]:
        return lambda _device=None: stream

    def memory(reading: int) -> Callable[..., int]:
        return lambda _device=None: device.memory_bytes()[reading]

    def memory_stats(_device: Any = None) -> dict[str, int]:
        now, peak = device.memory_bytes()
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        counts = {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.current": 0}
        readings = {"current": now, "peak": peak, "allocated": now, "freed": 0}
        return counts | {f"{k}.all.{n}": value for k in kinds for n, value in readings.items()}

    def reset_peak(_device: Any = None) -> None:
        device.reset_peak_memory()

    names: dict[str, tuple[Any, str]] = {
        "current_device": (lambda: cpu, "given as device= to factories all over Megatron"),
        "set_device": (nothing(), "one device for all ranks"),
        "device_count": (lambda: 1, "ranks are counted per device"),
        "device": (_entered, "context of Megatron's RNG functions"),
        "get_device_capability": (lambda _device=None: (0, 0), "kernels are chosen by it"),
        "get_device_properties": (_no_properties, "torch.compile asks, and takes this for a no"),
        "get_device_name": (lambda _device=None: "cpu", "logged"),
        "_lazy_call": (call_now, "queues forever where CUDA never starts"),
        "_lazy_init": (nothing(), "raises without CUDA"),
        "init": (nothing(), "raises without CUDA"),
        "synchronize": (nothing(), "timers, schedules and checkpoints call it"),
        "empty_cache": (nothing(), "there is no caching allocator"),
        "Stream": (Stream, "gradient buffers and dispatchers make side streams"),
        "Event": (Event, "timers and dispatchers record them"),
        "stream": (_entered, "work is put on side streams"),
        "current_stream": (current_stream(), "side streams wait for it"),
        "default_stream": (current_stream(), "side streams wait for it"),
        "set_stream": (nothing(), "there is one stream"),
        "is_current_stream_capturing": (lambda: False, "graphs are never captured"),
        "memory_allocated": (memory(0), "logged"),
        "memory_reserved": (memory(0), "logged"),
        "max_memory_allocated": (memory(1), "logged"),
        "max_memory_reserved": (memory(1), "logged"),
        "memory_stats": (memory_stats, "logged"),
        "reset_peak_memory_stats": (reset_peak, "readings are taken per step"),
    }
    ranges = {"range_push": nothing(), "range_pop": nothing(), "mark": nothing(), "range": _entered}
    return (
        *(Substitute(f"torch.cuda:{name}", new, why) for name, (new, why) in names.items()),
        *(
            Substitute(f"torch.cuda.nvtx:{name}", new, "profiler ranges of schedules and layers")
            for name, new in ranges.items()
        ),
    )
