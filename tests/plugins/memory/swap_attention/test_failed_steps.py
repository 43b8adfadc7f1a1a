"""Steps that fail: nothing of them stays, on the device or the host, and the next try is exact."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .test_swapping import assert_same_bits, step, swapping
from .toy import LateCopier, Stack, make_stack


def run_out(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("on purpose")


@contextmanager
def failing(stack: Stack, where: str, layer: int) -> Iterator[None]:
    """Let the last linear of an attention fail, or the backward that begins with it."""

    def attach(module: object, inputs: object, output: Tensor) -> None:
        output.register_hook(run_out)

    hook: Any = run_out if where == "forward" else attach
    handle = stack.attention[layer].out.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def watch(copier: LateCopier) -> list[StorageWeakRef]:
    """Return a list to which both storages of each copy to the host are added."""
    copied: list[StorageWeakRef] = []
    to_host = copier.to_host

    def send(tensor: Tensor) -> Tensor:
        host = to_host(tensor)
        copied.extend(StorageWeakRef(x.untyped_storage()) for x in (tensor, host))
        return host

    copier.to_host = send  # type: ignore[method-assign]
    return copied


@pytest.mark.parametrize("min_bytes", [1, 1 << 20], ids=["all swapped", "none swapped"])
@pytest.mark.parametrize(("where", "layer"), [("forward", 1), ("forward", 2), ("backward", 1)])
def test_a_step_that_fails_leaves_nothing_and_the_next_try_is_exact(
    where: str, layer: int, min_bytes: int
) -> None:
    plain, stack = make_stack(), make_stack()
    plugin, device = swapping(stack, min_bytes=min_bytes)
    plugin.ascend_before_step()
    step(stack)  # by which the order of backwards is known
    plugin.ascend_before_step()
    copied = watch(device.copier)
    with failing(stack, where, layer), pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        step(stack)
    device.copier.wait_device()  # the kernel waits for all streams
    plugin.ascend_before_step()
    gc.collect()
    saved = [storage for attention in stack.attention for storage in attention.made]
    assert bool(copied) == (min_bytes == 1)
    assert all(storage.expired() for storage in (*copied, *saved))
    assert plugin._swapper is not None
    assert plugin._swapper._leaving == []
    assert_same_bits(step(stack), step(plain))
