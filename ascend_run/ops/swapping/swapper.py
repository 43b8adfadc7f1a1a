"""Keep saved tensors on the host between their layer's forward and its backward.

While a module runs forward, autograd passes every tensor that it saves to ``Call.pack`` and saves
the result instead. The result is a handle, so autograd holds no device memory; the device storage
is freed when the forward drops its own references and the copy is complete. ``Call.unpack`` returns
the tensor again, from the same bytes.

Timeline of layer i: copies to the host start while it runs forward; before the next forward, the
computation waits for them and releases the device storage; the backward ``prefetch`` layers before
its own starts the copies to the device; its own backward waits for those.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.transfer.saved_storages import (
    Block,
    addresses,
    arguments_that_stay,
    can_leave,
    whole,
)
from ascend_run.types.device import HostCopier
from ascend_run.types.forward import Forward, ForwardLink

from .backward_order import BackwardOrder
from .call import Call


class Swapper:
    """Offload and prefetch the saved tensors of all wrapped modules of one rank.

    Any number of forwards may run before the first backward (micro-batches, pipeline stages,
    virtual chunks): the state of each is in its Call.

    Args:
        min_bytes: Smaller storages stay on the device. Unit: bytes.
        prefetch: How far ahead of its backward a layer is prefetched. Unit: layers.
    """

    def __init__(
        self, device: torch.device, copier: HostCopier, *, min_bytes: int, prefetch: int
    ) -> None:
        self.copier = copier
        self.prefetch = prefetch
        self.swapped_bytes = 0
        """Bytes copied to the host in this step."""
        self.late_fetches = 0
        """Forwards of this step whose backward waited for a copy that had not started."""
        self.order = BackwardOrder()
        # Weak: a call is freed with the last autograd handle that refers to it.
        self._calls: list[weakref.ref[Call]] = []
        self._device = device
        self._min_bytes = min_bytes
        self._leaving: list[Call] = []
        self._last: weakref.ref[Call] | None = None
        self._joined: Call | None = None
        """The last call, while modules of its layer may still join it."""
        self._held: dict[nn.Module, frozenset[int]] = {}
        """Module -> addresses of its parameters and buffers in this step."""

    def begin_step(self) -> None:
        """Reset the counts of forwards and bytes, and let go what a failed step has left."""
        self._let_go(stays=None)
        self._joined = None
        self.swapped_bytes = self.late_fetches = 0
        self.order.begin_step()
        self._calls.clear()
        self._held.clear()

    def expected_after(self, call: Call) -> Call | None:
        """Return the call whose backward is expected after another's; None if unknown.

        In the first step that is known within a chunk and micro-batch only.
        """
        if not self.order.known:
            return call.previous
        number = self.order.after(call.number)
        known = number is not None and number < len(self._calls)
        return self._calls[number]() if known and number is not None else None

    def links(self, modules: Sequence[nn.Module], layer: tuple[int, int]) -> list[ForwardLink]:
        """Return links that offload the saved tensors of one layer's modules together.

        Args:
            modules: In execution order.
            layer: Chunk of the pipeline rank, and index in it.
        """
        last = len(modules) - 1
        wraps = [
            partial(self._swapping, module, layer, place == 0, place == last)
            for place, module in enumerate(modules)
        ]
        return [ForwardLink(wrap=wrap, compilable=False) for wrap in wraps]

    def _swapping(
        self, module: nn.Module, layer: tuple[int, int], begins: bool, ends: bool, inner: Forward
    ) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            call = self.joined(module, layer, args, kwargs, begins=begins, ends=ends)
            with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                return inner(*args, **kwargs)

        return forward

    def joined(
        self,
        module: nn.Module,
        layer: tuple[int, int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        begins: bool,
        ends: bool,
    ) -> Call:
        """Return the call to which a forward of one of a layer's modules belongs, that is about to
        run; its ``pack`` and ``unpack`` are the hooks for what the forward saves.

        Args:
            begins, ends: Whether it is the first or the last such module of the layer.
        """
        stays = self._held_by(module) | arguments_that_stay(args, kwargs)
        if begins or self._joined is None:
            self._let_go(stays=self.order.next if self.prefetch else None)
            self._joined = self._begin(layer, stays)
        call = self._joined
        call.resident = stays  # not those of the module before: addresses are used again
        if ends:
            self._joined = None
        return call

    def _held_by(self, module: nn.Module) -> frozenset[int]:
        held = self._held.get(module)
        if held is None:
            held = self._held[module] = addresses([*module.parameters(), *module.buffers()])
        return held

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor can be offloaded and is large enough."""
        return can_leave(tensor, self._device, self._min_bytes)

    def send(self, call: Call, storage: torch.UntypedStorage) -> Block:
        """Start copying a full storage of one forward to the host."""
        if not self._leaving or self._leaving[-1] is not call:
            self._leaving.append(call)
        source = whole(storage)
        self.swapped_bytes += storage.nbytes()
        host = self.copier.to_host(source)
        return Block(
            nbytes=storage.nbytes(), source=StorageWeakRef(storage), device=source, host=host
        )

    def bring_back(self, host: Tensor) -> Tensor:
        """Start copying to the device."""
        out = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self.copier.to_device(host, out)
        return out

    def keep(self, call: Call) -> None:
        """Finish the copies of a call whose backward started first, and keep its device
        storages.
        """
        self.copier.wait_host()
        self._leaving.remove(call)

    def _begin(self, layer: tuple[int, int], resident: frozenset[int]) -> Call:
        last = self._last() if self._last is not None else None
        follows = last is not None and last.layer[0] == layer[0] and last.layer[1] < layer[1]
        call = Call(
            self,
            number=len(self._calls),
            layer=layer,
            resident=resident,
            previous=last if follows else None,
        )
        self._last = weakref.ref(call)
        self._calls.append(self._last)
        return call

    def _let_go(self, *, stays: int | None) -> None:
        """Wait for the copies of earlier forwards, and drop the device storages.

        Args:
            stays: The call whose backward is expected next, if known, which would be copied back at
                once.
        """
        if not self._leaving:
            return
        self.copier.wait_host()
        for call in self._leaving:
            if call.number != stays:
                call.let_go()
        self._leaving = [call for call in self._leaving if call.number == stays]
