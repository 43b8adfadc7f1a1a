"""Gloo between ranks whose tensors are on an accelerator, and which may share one.

Gloo copies the tensors of most collectives to the host and back. It coalesces none of them, needs
equal shapes on all ranks, and sends from and receives into the memory of the host alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs

from .runtime import PLATFORM_VARIABLE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

SHARED_VARIABLE: Final = "ASCEND_RUN_TEST_SHARED_DEVICES"
"""1: where there are fewer devices than ranks of a trial, ranks share them."""


def local_rank(rank: int) -> int:
    """Return which device of this machine a rank of a trial uses.

    Without any device it is the rank itself, for which the platform then finds none.
    """
    return rank % (device_count() or rank + 1) if shares_devices() else rank


def shares_devices() -> bool:
    """Return whether the ranks of a trial on an accelerator may share one."""
    on_cpu = os.environ.get(PLATFORM_VARIABLE, "cpu") == "cpu"
    return not on_cpu and os.environ.get(SHARED_VARIABLE) == "1"


def device_count() -> int:
    """Return the number of accelerators that torch finds on this machine."""
    import torch

    return torch.accelerator.device_count()


@contextmanager
def gloo_on_device(device_type: str) -> Iterator[None]:
    """In this block, do what gloo does not: reduce Megatron's buckets of gradients one by one, pad
    unequal parts of a collective, and send through the host.

    Args:
        device_type: Of torch's device; nothing changes on the CPU.
    """
    if device_type == "cpu":
        yield
        return
    with bucket_by_bucket(), through_host(), padded():
        yield


@attrs.frozen
class _Collectives:
    """What Megatron would wait for as one: collectives that are under way."""

    works: list[Work] = attrs.field(factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@contextmanager
def bucket_by_bucket() -> Iterator[None]:
    """Let Megatron's data parallelism reduce and gather each bucket in a collective of its own, in
    this block."""
    from megatron.core.distributed import param_and_grad_buffer
    from torch import distributed

    buffers: Any = param_and_grad_buffer
    opened: list[_Collectives] = []

    @contextmanager
    def one_by_one(*_: object, **options: object) -> Iterator[_Collectives]:
        """Replace torch's manager, whose collectives start at its end."""
        opened.append(_Collectives())
        try:
            yield opened[-1]
        finally:
            opened.pop()

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron drops what an asynchronous call returns, for the manager has it."""

        def call(*args: Any, **options: Any) -> Any:
            work = function(*args, **options)
            if opened and work is not None:
                opened[-1].works.append(work)
            return work

        return call

    collectives = (
        (distributed, "all_reduce"),
        (buffers, "dist_reduce_scatter_func"),
        (buffers, "dist_all_gather_func"),
    )
    replaced = [(owner, name, kept(getattr(owner, name))) for owner, name in collectives]
    with _set((buffers, "_coalescing_manager", one_by_one), *replaced):
        yield


@contextmanager
def _set(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes in this block."""
    before = [getattr(owner, name) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(attributes, before, strict=True):
            setattr(owner, name, value)


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


@contextmanager
def through_host(copied: Callable[[Tensor], bool] = _is_on_device) -> Iterator[None]:
    """Let sends and receives of tensors go through copies on the host, in this block.

    Args:
        copied: Of which tensors; a call with another one does not change.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    isend, irecv = distributed.isend, distributed.irecv

    def send(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not copied(tensor):
            return isend(tensor, *args, **options)
        host = tensor.detach().to("cpu", copy=True)
        work = isend(host, *args, **options)
        return work and _Sent(work, host)

    def receive(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not copied(tensor):
            return irecv(tensor, *args, **options)
        host = tensor.new_empty(tensor.shape, device="cpu")
        work = irecv(host, *args, **options)
        return work and _Received(work, host, tensor)

    functions = (("isend", send), ("irecv", receive))
    # batch_isend_irecv compares what it is given with those of the second module.
    modules = (distributed, distributed_c10d)
    with _set(*((module, name, new) for module in modules for name, new in functions)):
        yield


@attrs.frozen(eq=False)
class _Sent:
    """A send of a copy, which is held until it is done."""

    _work: Work
    _host: Tensor

    def wait(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


@attrs.frozen(eq=False)
class _Received(_Sent):
    """A receive; what arrives is copied to the device by the rank that waits."""

    _tensor: Tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.detach().copy_(self._host)  # Megatron's buffers require gradients


@contextmanager
def padded(copied: Callable[[Tensor], bool] = _is_on_device) -> Iterator[None]:
    """Let an all-gather and a reduce-scatter of unequal parts pad them to the longest, in this
    block.

    Args:
        copied: As for ``through_host``.
    """
    from torch import distributed

    from ascend_run.ops.transfer.unequal_parts import padded_all_gather, padded_reduce_scatter

    all_gather, reduce_scatter = distributed.all_gather, distributed.reduce_scatter
    gather_padded, scatter_padded = (
        padded_all_gather(all_gather),
        padded_reduce_scatter(reduce_scatter),
    )

    def gather(parts: list[Tensor], tensor: Tensor, *args: Any, **options: Any) -> Any:
        function = gather_padded if copied(tensor) else all_gather
        return function(parts, tensor, *args, **options)

    def scatter(output: Tensor, parts: list[Tensor], *args: Any, **options: Any) -> Any:
        function = scatter_padded if copied(output) else reduce_scatter
        return function(output, parts, *args, **options)

    with _set((distributed, "all_gather", gather), (distributed, "reduce_scatter", scatter)):
        yield
