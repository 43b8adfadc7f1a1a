"""Measure what layers keep for backward, by storages, and how long their parts take."""

from __future__ import annotations

import enum
import itertools
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ascend_run.ops.saved_tensors import without_graph
from ascend_run.plugin_api import Device, Forward

READERS: Final = {"input_layernorm": "self_attention", "pre_mlp_layernorm": "mlp"}
"""Norm, whose output can be discarded -> the module that reads its output."""
PARTS: Final = (*READERS, *READERS.values())
"""Parts of a layer that can be treated beside one another."""
CHOICES: Final = (
    *itertools.chain.from_iterable(
        itertools.combinations(PARTS, count) for count in range(len(PARTS) + 1)
    ),
    ("",),
)
"""What a layer may recompute: each set of its parts, or the layer itself."""
NEVER: Final = 1 << 62
"""Bytes of a choice that a layer does not have."""


class Mode(enum.Enum):
    """What is measured in the present step."""

    PARTS = "parts"  #: Each part of each layer, of which nothing is recomputed.
    LAYERS = "layers"  #: What each layer keeps.
    NOTHING = "nothing"


class Layer:
    """What is known of one layer on this rank, and what it recomputes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.chosen: frozenset[str] = frozenset()
        """The parts that it recomputes."""
        self.nbytes: dict[tuple[str, ...], int] = {}
        """Choice -> bytes that it keeps, the most of all forwards."""
        self.nanoseconds: dict[str, int] = {}
        """Part -> time of its forward, the least of all."""
        self.waiting = 0
        """Forwards whose backward has not begun."""

    @property
    def index(self) -> int:
        """Its index in the whole model."""
        return int(getattr(self.module, "layer_number", 0)) - 1

    @property
    def has_experts(self) -> bool:
        return hasattr(getattr(self.module, "mlp", None), "router")

    def add(self, nbytes: Mapping[tuple[str, ...], int], nanoseconds: Mapping[str, int]) -> None:
        """Take in what one forward has shown."""
        for choice, size in nbytes.items():
            self.nbytes[choice] = max(size, self.nbytes.get(choice, 0))
        for part, spent in nanoseconds.items():
            self.nanoseconds[part] = min(spent, self.nanoseconds.get(part, spent))


class _Handle:
    """What autograd saves in place of a tensor; it is freed with the node that saves it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@attrs.define
class _Call:
    """One call of a part."""

    part: str
    given: Tensor  #: Its input.
    inner: list[_Call] = attrs.field(factory=list)  #: The calls within it.
    result: Tensor | None = None
    nanoseconds: int = 0
    saved: dict[int, Tensor] = attrs.field(factory=dict)
    """Storage -> a tensor in it that is kept for backward; by those, no address is used again."""

    def end(
        self, result: Tensor, nanoseconds: int, handles: Sequence[weakref.ref[_Handle]]
    ) -> None:
        """Take in what is kept now. Of graphs that are gone, as that of a forward which is to be
        recomputed, nothing is."""
        self.result, self.nanoseconds = result, nanoseconds
        for reference in handles:
            if handle := reference():
                self.saved[_storage(handle.tensor)] = handle.tensor


class Recorder:
    """Runs layers and their parts, and measures them.

    Args:
        device: This rank's, whose kernels are waited for where time is taken.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._calls: list[_Call] = []
        self.mode = Mode.PARTS
        self.layers: list[Layer] = []
        self.moments: set[tuple[int, ...]] = set()
        """How many forwards of each layer waited at the same time."""
        self.live = 0
        """Bytes kept by layers whose backward has not begun."""
        self.peak = 0
        """The most of them in a step."""

    def begin(self, mode: Mode) -> None:
        """Begin a step."""
        self.mode, self.live, self.peak = mode, 0, 0
        self._calls.clear()
        for layer in self.layers:
            layer.waiting = 0

    def assume(self) -> None:
        """Let layers that have not run be like one that has, of their kind if there is one."""
        measured = [layer for layer in self.layers if layer.nbytes]
        for layer in self.layers:
            if measured and not layer.nbytes:
                kind = [found for found in measured if found.has_experts == layer.has_experts]
                like = (kind or measured)[-1]
                layer.add(like.nbytes, like.nanoseconds)
        most = max(map(max, self.moments), default=1)
        self.moments = {(most,) * len(self.layers)}

    def part(self, name: str, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a part of the layer that is running."""
        if not self._calls:
            return inner(*args, **kwargs)
        call = _Call(name, _given(args, kwargs))
        out = self._timed(call, inner, *args, **kwargs)
        self._calls[-1].inner.append(call)
        return out

    def layer(self, layer: Layer, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer; ``mode`` says whether its parts are looked at, too."""
        call = _Call("", _given(args, kwargs))
        out = self._timed(call, inner, *args, **kwargs)
        lasting = {_storage(tensor) for tensor in _lasting(layer.module, call.given, args, kwargs)}
        if self.mode is Mode.PARTS:
            nbytes = {choice: _kept(call, choice, lasting) for choice in CHOICES}
            spent = {found.part: found.nanoseconds for found in (call, *call.inner)}
            layer.add(nbytes, spent)
        everything = _sizes([call, *call.inner])
        self._count(layer, sum(everything[key] for key in everything.keys() - lasting), call.result)
        return out

    def _timed(self, call: _Call, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        self._device.synchronize()
        begin = time.perf_counter_ns()
        self._calls.append(call)
        handles: list[weakref.ref[_Handle]] = []
        try:
            with saved_tensors_hooks(partial(_packed, handles), _tensor):
                out = inner(*args, **kwargs)
        finally:
            self._calls.pop()
        self._device.synchronize()
        first = out[0] if isinstance(out, tuple) else out
        call.end(first, time.perf_counter_ns() - begin, handles)
        return out

    def _count(self, layer: Layer, nbytes: int, result: Tensor | None) -> None:
        """Count what a forward keeps until the gradient of its result arrives."""
        if result is None or not result.requires_grad:
            return
        layer.waiting += 1
        self.moments.add(tuple(each.waiting for each in self.layers))
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        result.register_hook(partial(self._begin_backward, layer, nbytes))

    def _begin_backward(self, layer: Layer, nbytes: int, _: Tensor) -> None:
        layer.waiting -= 1
        self.live -= nbytes


def _kept(call: _Call, choice: Collection[str], lasting: Collection[int]) -> int:
    """Return the bytes that a layer keeps if it recomputes some parts; NEVER if it cannot.

    A part that is recomputed keeps its input, and nothing else that it alone saves; the output of a
    norm that is recomputed is freed.
    """
    calls = {found.part: found for found in call.inner} | {"": call}
    parts = [calls.get(part) for part in choice]
    if not all(part is not None and part.given.requires_grad for part in parts):
        return NEVER
    again = [part for part in parts if part is not None]
    if "" in choice:
        return call.given.untyped_storage().nbytes()
    others = [found for found in calls.values() if found not in again]
    sizes = _sizes(others) | {_storage(p.given): p.given.untyped_storage().nbytes() for p in again}
    for norm in (part for part in again if part.part in READERS):
        assert norm.result is not None
        reader = calls.get(READERS[norm.part])
        known = (norm, reader)
        freed = _storage(norm.result)
        read_elsewhere = any(freed in c.saved for c in calls.values() if c not in known)
        if reader is None or read_elsewhere or freed == _storage(norm.given):
            return NEVER
        sizes.pop(freed, None)
    return sum(sizes[key] for key in sizes.keys() - {*lasting})


def _sizes(calls: Collection[_Call]) -> dict[int, int]:
    return {
        key: tensor.untyped_storage().nbytes()
        for call in calls
        for key, tensor in call.saved.items()
    }


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    given: Tensor = args[0] if args else kwargs["hidden_states"]
    return given


def _lasting(
    module: nn.Module, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yield what is not a layer's own: its weights, and masks and tables that it is given."""
    yield from module.parameters()
    yield from module.buffers()
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor) and tensor is not given:
                yield tensor


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _packed(handles: list[weakref.ref[_Handle]], tensor: Tensor) -> _Handle:
    """Return what autograd saves."""
    handle = _Handle(without_graph(tensor))
    handles.append(weakref.ref(handle))
    return handle


def _tensor(handle: _Handle) -> Tensor:
    return handle.tensor
