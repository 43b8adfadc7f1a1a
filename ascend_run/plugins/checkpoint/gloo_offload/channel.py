"""Send tensors between ranks of a group in slices of bounded size, with the device's backend.

The tensors of one call are concatenated to a stream of elements per dtype, which is split into
slices: many small tensors share a send, and a large one takes several. Both ends know the tensors'
dtypes and sizes, so they split alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.plugin_api import Device


class Counts(Protocol):
    """Counters of communication."""

    messages: int
    sent_bytes: int
    received_bytes: int


class Channel:
    """Communicate between the first rank of a group, the writer, and every other rank.

    Args:
        group: A group with the device's backend.
        slice_elements: Maximum elements per send. Unit: elements.
        counts: Counters of the payload; metadata is not counted.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: Device, slice_elements: int, counts: Counts
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._device = device
        self._slice_elements = slice_elements
        self._counts = counts

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send to one rank, which calls ``receive`` with tensors of the same dtypes and sizes."""
        for part in self._slices(tensors, fill=True):
            dist.send(part, group=self._group, group_dst=to)
            self._counts.sent_bytes += part.nbytes

    def receive(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Fill tensors with what one rank sends."""
        for part in self._slices(tensors, fill=False):
            dist.recv(part, group=self._group, group_src=sender)
            self._counts.received_bytes += part.nbytes

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast from the writer to every rank."""
        writes = self.rank == 0
        for part in self._slices(tensors, fill=writes):
            dist.broadcast(part, group=self._group, group_src=0)
            if writes:
                self._counts.sent_bytes += part.nbytes
            else:
                self._counts.received_bytes += part.nbytes

    def send_json(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self._device.torch_device)
        dist.send(length, group=self._group, group_dst=to)
        dist.send(data.to(self._device.torch_device), group=self._group, group_dst=to)

    def receive_json(self, sender: int) -> Any:
        where = self._device.torch_device
        length = torch.zeros(1, dtype=torch.int64, device=where)
        dist.recv(length, group=self._group, group_src=sender)
        data = torch.empty(int(length), dtype=torch.uint8, device=where)
        dist.recv(data, group=self._group, group_src=sender)
        return json.loads(data.cpu().numpy().tobytes())

    def _slices(self, tensors: Sequence[Tensor], *, fill: bool) -> Iterator[Tensor]:
        """Yield one reused buffer on the device, as bytes.

        With ``fill`` it holds the next elements of the tensors; without, its content is copied to
        them after the yield.
        """
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            stream = [tensor for tensor in tensors if tensor.dtype is dtype]
            elements = min(self._slice_elements, sum(tensor.numel() for tensor in stream))
            buffer = torch.empty(elements, dtype=dtype, device=self._device.torch_device)
            for runs in _packed(stream, elements):
                used = buffer[: sum(run.numel() for run in runs)]
                if fill:
                    self._copy_in(runs, used)
                yield used.view(torch.uint8)
                self._counts.messages += 1
                if not fill:
                    self._copy_out(used, runs)

    def _copy_in(self, runs: Sequence[Tensor], used: Tensor) -> None:
        for run, place in zip(runs, used.split([run.numel() for run in runs]), strict=True):
            place.copy_(run)

    def _copy_out(self, used: Tensor, runs: Sequence[Tensor]) -> None:
        source = used
        if any(run.device != used.device for run in runs):
            # Through pinned memory if the device has it: one copy instead of one per run.
            copier = self._device.host_copier()
            source = copier.to_host(used)
            copier.wait_host()
            self._device.synchronize()
        for run, part in zip(runs, source.split([run.numel() for run in runs]), strict=True):
            run.copy_(part)


def _packed(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield lists of contiguous runs with ``most`` elements each, in the tensors' order.

    The last list may be shorter.
    """
    ready: list[Tensor] = []
    room = most
    for tensor in tensors:
        for run in _runs(tensor.detach()):
            while run.numel() > room:
                yield [*ready, run[:room]]
                run, ready, room = run[room:], [], most
            if run.numel():
                ready.append(run)
                room -= run.numel()
    if ready:
        yield ready


def _runs(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in order as flat views, without a copy, which might be large."""
    if tensor.is_contiguous():
        yield tensor.view(-1)
        return
    for row in tensor.unbind(0):
        yield from _runs(row)
