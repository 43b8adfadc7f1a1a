"""Gradients of an accelerator are reduced bucket by bucket: gloo coalesces none of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@attrs.frozen
class _Reductions:
    """Collectives of a group that are under way."""

    group: ProcessGroup

    def wait(self) -> None:
        """Wait for all of them, as gloo's barrier does."""
        from torch import distributed

        distributed.barrier(group=self.group)


@contextmanager
def _one_by_one(
    group: ProcessGroup, device: object = None, async_ops: bool = False
) -> Iterator[_Reductions]:
    """Replace torch's manager, whose collectives start at its end."""
    yield _Reductions(group)


@contextmanager
def bucket_by_bucket(device_type: str) -> Iterator[None]:
    """Let Megatron's data parallelism reduce each bucket in a collective of its own, in this block.

    Args:
        device_type: Of torch's device; nothing changes on the CPU.
    """
    if device_type == "cpu":
        yield
        return
    from megatron.core.distributed import param_and_grad_buffer as buffers

    coalesced = buffers._coalescing_manager
    buffers._coalescing_manager = _one_by_one  # type: ignore[assignment]  # names other classes
    try:
        yield
    finally:
        buffers._coalescing_manager = coalesced
