"""Saved tensors that live on the host between their layer's forward and its backward.

While a module runs forward, autograd hands every tensor that it saves to ``Call.pack`` and keeps
what that returns. It returns a handle, so autograd holds no device memory; the device storage is
freed when the forward drops its own references and the copy is complete. ``Call.unpack`` returns
the tensor again, from the same bytes.

Timeline of layer i: copies start while it runs forward; before the next forward the computation
waits for them and releases the device storage; the backward that comes ``prefetch`` before its own
starts bringing it back; its own backward waits for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ascend_run.plugin_api import Device

from .backward_order import BackwardOrder


@attrs.define(eq=False)
class _Block:
    """One storage: its bytes on the host and, at times, on the device."""

    host: Tensor
    """[n] uint8."""
    device: Tensor | None
    """[n] uint8; None while it is away."""


@attrs.frozen(eq=False)
class _Handle:
    """What autograd keeps in place of a tensor: which bytes, and how they are read."""

    call: Call
    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Call:
    """One forward of one layer's modules, until their backward is done.

    It goes through: ``leaving`` (copies under way, device storage still held), ``away``, ``coming``
    and ``here``. A backward that starts before the next forward finds it ``leaving`` and uses the
    device storage as it is.
    """

    def __init__(
        self, swapper: Swapper, number: int, resident: frozenset[int], previous: Call | None
    ) -> None:
        self.state = "leaving"
        self.number = number
        """Which forward of this step it is, from 0."""
        self._swapper = swapper
        self.resident = resident
        self._previous = weakref.ref(previous) if previous is not None else None
        # By address of the storage, which means something only while the storage is held.
        self._leaving: dict[int, _Block] = {}
        # Weak: a block goes with the last handle of autograd's that reads it.
        self._blocks: list[weakref.ref[_Block]] = []

    @property
    def previous(self) -> Call | None:
        """The forward before this one, while its backward is still to come."""
        return self._previous() if self._previous is not None else None

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """What autograd keeps: a handle, or the tensor itself where it is not worth a copy."""
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
            self, block, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    @staticmethod
    def unpack(kept: Tensor | _Handle) -> Tensor:
        """The tensor, bit for bit."""
        if isinstance(kept, Tensor):
            return kept
        kept.call.make_ready()
        assert kept.block.device is not None
        like = torch.empty(0, dtype=kept.dtype, device=kept.block.device.device)
        storage = kept.block.device.untyped_storage()
        return like.set_(storage, kept.offset, kept.size, kept.stride)

    def let_go(self) -> None:
        """Drop the device storages, after their copies have landed."""
        for block in self._leaving.values():
            block.device = None
        self._leaving.clear()
        self.state = "away"

    def fetch(self) -> None:
        """Start bringing everything back that is still waited for."""
        for block in self._live_blocks():
            block.device = self._swapper.bring_back(block.host)
        self.state = "coming"

    def make_ready(self) -> None:
        """Let the computation read the device storages from here on; start on the next layers."""
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
    """Sends and brings back the saved tensors of all wrapped modules of one rank.

    Any number of forwards may be under way before the first backward (micro-batches, pipeline
    stages, virtual chunks): everything that belongs to one is in its Call.

    Args:
        min_bytes: Smaller storages stay. Unit: bytes.
        prefetch: Unit: layers.
    """

    def __init__(self, device: Device, *, min_bytes: int, prefetch: int) -> None:
        self.copier = device.host_copier()
        self.prefetch = prefetch
        self.swapped_bytes = 0
        """Sent to the host in this step."""
        self.late_fetches = 0
        """Forwards of this step whose backward had to wait for a copy that had not begun."""
        self.order = BackwardOrder()
        # Weak: a call goes with autograd's last handle of it.
        self._calls: list[weakref.ref[Call]] = []
        self._device = device.torch_device
        self._min_bytes = min_bytes
        self._leaving: list[Call] = []
        self._last: weakref.ref[Call] | None = None
        self._joined: Call | None = None
        """The last one, while modules of its layer may still join it."""

    def begin_step(self) -> None:
        """Count forwards and bytes from 0 again."""
        self.swapped_bytes = self.late_fetches = 0
        self.order.begin_step()
        self._calls.clear()

    def expected_after(self, call: Call) -> Call | None:
        """The call whose backward is expected after that of another; None where it is not known."""
        if not self.order.known:
            return call.previous
        number = self.order.after(call.number)
        known = number is not None and number < len(self._calls)
        return self._calls[number]() if known and number is not None else None

    def wrap(self, modules: Sequence[nn.Module]) -> None:
        """Give modules of one layer forwards that swap; their parameters and names stay.

        What they save leaves and comes back together.

        Args:
            modules: In the order in which the layer runs them.
        """
        for place, module in enumerate(modules):
            self._wrap(module, begins=place == 0, ends=place == len(modules) - 1)

    def _wrap(self, module: nn.Module, *, begins: bool, ends: bool) -> None:
        inner = module.forward

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

        module.forward = forward

    def takes(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is one that can be swapped and is worth it."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= self._min_bytes
        )

    def send(self, call: Call, storage: torch.UntypedStorage) -> _Block:
        """Start copying a whole storage of one forward to the host."""
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
        """Backward has reached a call that never left: end its copies, keep its storages."""
        self.copier.wait_host()
        self._leaving.remove(call)

    def _begin(self, resident: frozenset[int]) -> Call:
        previous = self._last() if self._last is not None else None
        call = Call(self, len(self._calls), resident, previous)
        self._last = weakref.ref(call)
        self._calls.append(self._last)
        return call

    def _let_go(self) -> None:
        """Wait for the copies of earlier forwards, and drop what they copied.

        The one whose backward comes next stays, where that is known: it would be brought back at
        once.
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
    """Addresses of storages that stay on the device whatever autograd keeps: parameters, buffers,
    and arguments that need no gradient (rotary tables, masks), which all layers share."""
    shared = [
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and not leaf.requires_grad
    ]
    tensors = [*module.parameters(), *module.buffers(), *shared]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
