"""Graphs whose saved tensors are kept by hooks are freed, with and without a backward."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.recomputed import RecomputedForward, repeat_forward
from ascend_run.ops.saved_tensors import without_graph


def test_a_graph_that_is_dropped_is_freed() -> None:
    x = torch.ones(8, requires_grad=True)
    with saved_tensors_hooks(without_graph, lambda tensor: tensor):
        out = x.exp()  # saves its output
    storage = StorageWeakRef(out.untyped_storage())
    assert not storage.expired()
    del out
    assert storage.expired()


def test_what_is_kept_is_the_same_storage_and_a_leaf_itself() -> None:
    x = torch.ones(8, requires_grad=True)
    out = x.exp()
    kept = without_graph(out)
    assert without_graph(x) is x
    assert kept.grad_fn is None
    assert kept.data_ptr() == out.data_ptr()
    assert kept._version == out._version
    out.detach().add_(1)
    assert kept._version == out._version


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_recomputed_forward_is_freed(has_backward: bool) -> None:
    """A matrix that is dropped and a column that is not, each saved by the node that makes it."""
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    made: list[StorageWeakRef] = []

    def forward(rows: Tensor) -> Tensor:
        hidden = (rows @ weight).relu()
        gates = hidden.sum(-1, keepdim=True).sigmoid()
        made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (hidden, gates))
        return (hidden * gates) @ weight

    repeat = partial(repeat_forward, forward, lambda: nullcontext(), ((x.detach(), True),))
    recomputed = RecomputedForward(repeat, [weight])
    with recomputed.saving():
        out = forward(x)
    out.register_hook(recomputed.restore)
    if has_backward:
        out.sum().backward()
    assert len(made) == (4 if has_backward else 2)
    assert not made[1].expired() or has_backward
    del out, recomputed, repeat
    assert all(storage.expired() for storage in made)
