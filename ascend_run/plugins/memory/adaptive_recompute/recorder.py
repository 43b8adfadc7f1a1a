"""Measure what layers keep for backward, by storages, and how long their parts take."""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ascend_run.ops.saved_tensors import without_graph
from ascend_run.plugin_api import Device, Forward

from .layer import Call, Handle, Layer, kept, lasting_of
from .treatment import Treatment


class Mode(enum.Enum):
    """What is measured in the present step."""

    PARTS = "parts"  #: Each part of each layer, of which nothing is recomputed.
    LAYERS = "layers"  #: What each layer keeps.
    NOTHING = "nothing"


class Recorder:
    """Runs layers and their parts, and measures them.

    Args:
        device: This rank's, whose kernels are waited for where time is taken.
        possible: What may become of a layer.
        can_leave: Whether the device has more room if a saved tensor leaves it.
    """

    def __init__(
        self,
        device: Device,
        possible: Sequence[Treatment],
        can_leave: Callable[[Tensor], bool],
    ) -> None:
        self._device, self._possible, self._can_leave = device, possible, can_leave
        self._calls: list[Call] = []
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
                layer.add(like.nbytes, like.moved, like.nanoseconds)
        most = max(map(max, self.moments), default=1)
        self.moments = {(most,) * len(self.layers)}

    def part(self, name: str, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a part of the layer that is running."""
        if not self._calls:
            return inner(*args, **kwargs)
        call = Call(name, _given(args, kwargs))
        out = self._timed(call, inner, *args, **kwargs)
        self._calls[-1].inner.append(call)
        return out

    def layer(self, layer: Layer, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer; ``mode`` says whether its parts are looked at, too."""
        call = Call("", _given(args, kwargs))
        out = self._timed(call, inner, *args, **kwargs)
        calls = (call, *call.inner)
        lasting = {*lasting_of(layer.module, call.given, args, kwargs)}
        if self.mode is Mode.PARTS:
            layer.add(
                {treatment: kept(call, treatment, lasting) for treatment in self._possible},
                {found.part: found.moved(lasting) for found in call.inner},
                {found.part: found.nanoseconds for found in calls},
            )
        sizes = {key: size for found in calls for key, size in found.sizes().items()}
        self._count(layer, sum(sizes[key] for key in sizes.keys() - lasting), call.result)
        return out

    def packed(self, tensor: Tensor) -> Tensor | Handle:
        """Return what autograd saves, and see it if a layer is measured."""
        if not self._calls:
            return without_graph(tensor)
        handle = Handle(without_graph(tensor), can_leave=self._can_leave(tensor))
        self._calls[-1].handles.append(weakref.ref(handle))
        return handle

    def _timed(self, call: Call, inner: Forward, *args: Any, **kwargs: Any) -> Any:
        self._device.synchronize()
        begin = time.perf_counter_ns()
        self._calls.append(call)
        try:
            with saved_tensors_hooks(self.packed, unpacked):
                out = inner(*args, **kwargs)
        finally:
            self._calls.pop()
        self._device.synchronize()
        first = out[0] if isinstance(out, tuple) else out
        call.end(first, time.perf_counter_ns() - begin)
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


def unpacked(saved: Tensor | Handle) -> Tensor:
    """Return the tensor that was packed."""
    return saved.tensor if isinstance(saved, Handle) else saved


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    given: Tensor = args[0] if args else kwargs["hidden_states"]
    return given
