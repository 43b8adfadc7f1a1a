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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ascend_run.plugin_api import Device, ForwardLink
from ascend_run.types.forward import Forward

from .backward_order import BackwardOrder


@attrs.define(eq=False)
class _Block:
    """One storage: its bytes on the host and, while needed, on the device."""

    host: Tensor
    """[n] uint8."""
    device: Tensor | None
    """[n] uint8; None while offloaded."""


@attrs.frozen(eq=False)
class _Handle:
    """What autograd saves instead of a tensor: a storage and the tensor's view of it."""

    call: Call
    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Call:
    """One forward of one layer's modules, until their backward is done.

    Its states are, in order: ``leaving`` (copies in progress, device storage still held), ``away``,
    ``coming`` and ``here``. A backward that starts before the next forward finds it ``leaving`` and
    uses the device storage as it is.
    """

    def __init__(
        self, swapper: Swapper, number: int, resident: frozenset[int], previous: Call | None
    ) -> None:
        self.state = "leaving"
        self.number = number
        """Index of this forward in the step, from 0."""
        self._swapper = swapper
        self.resident = resident
        self._previous = weakref.ref(previous) if previous is not None else None
        # By address of the storage, which is unique only while the storage is held.
        self._leaving: dict[int, _Block] = {}
        # Weak: a block is freed with the last autograd handle that refers to it.
        self._blocks: list[weakref.ref[_Block]] = []

    @property
    def previous(self) -> Call | None:
        """The forward before this one, if its backward is still pending."""
        return self._previous() if self._previous is not None else None

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """Return what autograd saves: a handle, or the tensor itself if it is not worth a copy."""
        if not self._swapper.takes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.resident:
            return tensor
        block = self._leaving.get(address)
        if block is None:
            block = self._swapper.send(self, storage)
            self._leaving[address] = block
            self._blocks.append(weakref.ref(block))
        return _Handle(
            self, block, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    @staticmethod
    def unpack(kept: Tensor | _Handle) -> Tensor:
        """Return the saved tensor, bitwise unchanged."""
        if isinstance(kept, Tensor):
            return kept
        kept.call.make_ready()
        assert kept.block.device is not None
        like = torch.empty(0, dtype=kept.dtype, device=kept.block.device.device)
        storage = kept.block.device.untyped_storage()
        return like.set_(storage, kept.offset, kept.size, kept.stride)

    def let_go(self) -> None:
        """Drop the device storages, after their copies are complete."""
        for block in self._leaving.values():
            block.device = None
        self._leaving.clear()
        self.state = "away"

    def fetch(self) -> None:
        """Start copying every block that is still needed to the device."""
        for block in self._live_blocks():
            block.device = self._swapper.bring_back(block.host)
        self.state = "coming"

    def make_ready(self) -> None:
        """Make the device storages readable, and prefetch the next layers."""
        if self.state == "here":
            return
        if self.state == "leaving":
            self._swapper.keep(self)
            self._leaving.clear()
        else:
            if self.state == "away":
                self._swapper.late_fetches += 1
                self.fetch()
            self._swapper.copier.wait_device()
        self.state = "here"
        self._swapper.order.came(self.number)
        ahead = self._swapper.expected_after(self)
        for _ in range(self._swapper.prefetch):
            if ahead is None:
                return
            if ahead.state == "away":
                ahead.fetch()
            ahead = self._swapper.expected_after(ahead)

    def _live_blocks(self) -> Iterator[_Block]:
        for reference in self._blocks:
            if (block := reference()) is not None:
                yield block


class Swapper:
    """Offload and prefetch the saved tensors of all wrapped modules of one rank.

    Any number of forwards may run before the first backward (micro-batches, pipeline stages,
    virtual chunks): the state of each is in its Call.

    Args:
        min_bytes: Smaller storages stay on the device. Unit: bytes.
        prefetch: How far ahead of its backward a layer is prefetched. Unit: layers.
    """

    def __init__(self, device: Device, *, min_bytes: int, prefetch: int) -> None:
        self.copier = device.host_copier()
        self.prefetch = prefetch
        self.swapped_bytes = 0
        """Bytes copied to the host in this step."""
        self.late_fetches = 0
        """Forwards of this step whose backward waited for a copy that had not started."""
        self.order = BackwardOrder()
        # Weak: a call is freed with the last autograd handle that refers to it.
        self._calls: list[weakref.ref[Call]] = []
        self._device = device.torch_device
        self._min_bytes = min_bytes
        self._leaving: list[Call] = []
        self._last: weakref.ref[Call] | None = None
        self._joined: Call | None = None
        """The last call, while modules of its layer may still join it."""

    def begin_step(self) -> None:
        """Reset the counts of forwards and bytes."""
        self.swapped_bytes = self.late_fetches = 0
        self.order.begin_step()
        self._calls.clear()

    def expected_after(self, call: Call) -> Call | None:
        """Return the call whose backward is expected after another's; None if unknown."""
        if not self.order.known:
            return call.previous
        number = self.order.after(call.number)
        known = number is not None and number < len(self._calls)
        return self._calls[number]() if known and number is not None else None

    def links(self, modules: Sequence[nn.Module]) -> list[ForwardLink]:
        """Return links that offload the saved tensors of one layer's modules together.

        Args:
            modules: In execution order.
        """
        last = len(modules) - 1
        wraps = [
            partial(self._swapping, module, place == 0, place == last)
            for place, module in enumerate(modules)
        ]
        return [ForwardLink(wrap=wrap, compilable=False) for wrap in wraps]

    def _swapping(self, module: nn.Module, begins: bool, ends: bool, inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            stays = _long_lived(module, args, kwargs)
            if begins or self._joined is None:
                self._let_go()
                self._joined = self._begin(stays)
            call = self._joined
            call.resident |= stays
            if ends:
                self._joined = None
            with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                return inner(*args, **kwargs)

        return forward

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor can be offloaded and is large enough."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= self._min_bytes
        )

    def send(self, call: Call, storage: torch.UntypedStorage) -> _Block:
        """Start copying a full storage of one forward to the host."""
        if not self._leaving or self._leaving[-1] is not call:
            self._leaving.append(call)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage)
        self.swapped_bytes += storage.nbytes()
        return _Block(self.copier.to_host(source), source)

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

    def _begin(self, resident: frozenset[int]) -> Call:
        previous = self._last() if self._last is not None else None
        call = Call(self, len(self._calls), resident, previous)
        self._last = weakref.ref(call)
        self._calls.append(self._last)
        return call

    def _let_go(self) -> None:
        """Wait for the copies of earlier forwards, and drop the device storages.

        The call whose backward is expected next is kept, if known: it would be copied back at once.
        """
        if not self._leaving:
            return
        self.copier.wait_host()
        stays = self.order.next if self.prefetch else None
        for call in self._leaving:
            if call.number != stays:
                call.let_go()
        self._leaving = [call for call in self._leaving if call.number == stays]


def _long_lived(module: nn.Module, args: Any, kwargs: Any) -> frozenset[int]:
    """Return the addresses of storages that stay on the device in any case.

    These are parameters, buffers, arguments that need no gradient (rotary tables, masks), which all
    layers share, and arguments that are discarded.
    """
    shared = [
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
        and (not leaf.requires_grad or getattr(leaf, "ascend_discarded", False))
    ]
    tensors = [*module.parameters(), *module.buffers(), *shared]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
