"""A fake NPU in this process: torch_npu's device functions, recorded, on host memory and gloo.

``packages`` holds a ``torch_npu`` that imports like the real one: it sets ``torch.npu``, and its
``contrib.transfer_to_npu`` redirects ``torch.cuda`` to the device, which is the CPU platform's
facade here. Operators are the references. Work on a side stream only runs when it is waited for, so
a missing wait gives wrong numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ascend_run.core.patches import applied
from ascend_run.ops.transfer import stream_copier
from ascend_run.plugins.platforms.cpu.facade import facade_patches
from ascend_run.plugins.platforms.cpu.memory import HostMemory
from ascend_run.plugins.platforms.npu import device as device_module
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
from ascend_run.plugins.platforms.npu.proof.releases import REFERENCE
from tests.plugins.platforms.npu.reference import define_reference_operators
from tests.support.fake_streams import FakeStream, FakeStreams
from tests.support.npu_calls import check

PACKAGES = Path(__file__).parent / "packages"


@attrs.define
class Seen:
    """Recorded calls of the device."""

    calls: Counter[str] = attrs.field(factory=Counter)
    """Function of ``torch.npu`` -> calls."""
    devices: list[str] = attrs.field(factory=list)
    """Requested devices."""
    pinned: int = 0
    """Number of host tensors in pinned memory."""
    backends: list[str | None] = attrs.field(factory=list)
    """Backends of the process groups, in order."""
    options: list[Any] = attrs.field(factory=list)
    """``pg_options`` of the process groups that got some."""
    operators: Counter[str] = attrs.field(factory=Counter)


class _Computation(FakeStream):
    """The compute stream: it is never behind, so what it waits for runs at once."""

    def wait_stream(self, other: FakeStream) -> None:
        other.run()


class StandInNpu(FakeStreams):
    """The part of ``torch.npu`` that is used."""

    def __init__(self, seen: Seen, count: int) -> None:
        super().__init__()
        self._current = self.default = _Computation()
        self._seen, self._count = seen, count
        self._now, self._peak = 4096, 8192

    def _note(self, name: str) -> None:
        self._seen.calls[name] += 1

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def set_device(self, device: Any) -> None:
        self._note("set_device")

    def synchronize(self, device: Any = None) -> None:
        self._note("synchronize")

    def memory_allocated(self, device: Any = None) -> int:
        self._note("memory_allocated")
        return self._now

    def max_memory_allocated(self, device: Any = None) -> int:
        self._note("max_memory_allocated")
        return self._peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._note("reset_peak_memory_stats")
        self._peak = self._now

    def Stream(self) -> FakeStream:
        self._note("Stream")
        return super().Stream()

    def stream(self, stream: FakeStream) -> Any:
        self._note("stream")
        return super().stream(stream)

    def MemPool(self) -> object:
        self._note("MemPool")
        return object()

    @contextmanager
    def use_mem_pool(self, pool: object, device: Any = None) -> Iterator[None]:
        self._note("use_mem_pool")
        yield


class _Memory(HostMemory):
    """The device's memory, as the facade reads it."""

    def __init__(self, npu: StandInNpu) -> None:
        self._npu = npu

    def memory_bytes(self) -> tuple[int, int]:
        return self._npu.memory_allocated(), self._npu.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        self._npu.reset_peak_memory_stats()


class StandIn:
    """The active fake in this process; the package ``torch_npu`` finds it here."""

    under_way: StandIn | None = None

    def __init__(self, count: int, version: str) -> None:
        self.version = version
        self.seen = Seen()
        self.npu = StandInNpu(self.seen, count)
        self._undo = ExitStack()

    def transfer(self) -> None:
        """Redirect ``torch.cuda`` to this device, and NCCL to gloo."""
        rows = facade_patches(_Memory(self.npu))
        self._undo.enter_context(applied([("transfer_to_npu", row) for row in rows]))
        for name in ("init_process_group", "new_group"):
            self.replace(dist, name, self._on_hccl(getattr(dist, name)))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        absent = name not in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        if absent:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)

    def undo(self) -> None:
        self._undo.close()

    def _on_hccl(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            backend = args[0] if args and isinstance(args[0], str) else kwargs.get("backend")
            self.seen.backends.append(backend)
            if kwargs.get("pg_options") is not None:
                self.seen.options.append(kwargs["pg_options"])
            if backend == "hccl":
                args = ("nccl", *args[1:]) if args and args[0] == "hccl" else args
                kwargs = {**kwargs, "backend": "nccl"} if "backend" in kwargs else kwargs
            return plain(*args, **kwargs)

        return call


class _View(ModuleType):
    """torch with some names replaced."""

    def __init__(self, **names: Any) -> None:
        super().__init__("torch")
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def npu_on_the_cpu(count: int = 2, version: str = REFERENCE) -> Iterator[Seen]:
    """Give this process fake NPUs inside the block; each operator call is checked.

    Args:
        count: Number of NPUs of this machine.
        version: Of torch_npu.
    """
    define_reference_operators()
    stand_in = StandIn(count, version)
    seen = stand_in.seen

    def device(kind: str, index: int) -> torch.device:
        seen.devices.append(f"{kind}:{index}")
        return torch.device("cpu")

    def empty(shape: Sequence[int], *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        seen.pinned += pin_memory
        return torch.empty(shape, **options)

    StandIn.under_way = stand_in
    sys.path.insert(0, str(PACKAGES))
    stand_in.replace(device_module, "torch", _View(device=device))
    stand_in.replace(stream_copier, "torch", _View(empty=empty))
    try:
        with recorded_calls(check) as recorder:
            yield seen
        for call, count_of_call in recorder.calls.items():
            seen.operators[call.operator] += count_of_call
    finally:
        stand_in.undo()
        sys.path.remove(str(PACKAGES))
        for name in [n for n in sys.modules if n.partition(".")[0] == "torch_npu"]:
            del sys.modules[name]
        StandIn.under_way = None
