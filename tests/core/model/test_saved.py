"""What an attention kernel saves, as autograd keeps it."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from ascend_run.core.model.saved import flatten_saved
from ascend_run.types.attention import Saved


class Inner(NamedTuple):
    shape: tuple[int, ...]
    kept: dict[str, Tensor]
    absent: Tensor | None = None


class Outer(NamedTuple, Generic[Saved]):
    received: tuple[Tensor, ...]
    inner: dict[int, Saved]


def record() -> Outer[Any]:
    inner = Inner((3, 2), {"q": torch.ones(3, 2)})
    return Outer((torch.zeros(1), torch.zeros(2)), {0: (), 65536: inner})


def test_every_tensor_is_found_and_the_record_is_made_of_them_again() -> None:
    tensors, rebuild = flatten_saved(record())
    assert [x.shape for x in tensors] == [(1,), (2,), (3, 2)]
    found = rebuild([x + 5 for x in tensors])
    assert isinstance(found, Outer)
    assert [x.tolist() for x in found.received] == [[5.0], [5.0, 5.0]]
    assert found.inner[0] == ()
    inner = found.inner[65536]
    assert isinstance(inner, Inner)
    assert inner.shape == (3, 2)
    assert inner.absent is None
    assert torch.equal(inner.kept["q"], torch.full((3, 2), 6.0))


def test_what_rebuilds_it_holds_no_tensor() -> None:
    """So that what is swapped or recomputed is let go of."""
    whole = record()
    seen = weakref.ref(whole.received[1])
    tensors, rebuild = flatten_saved(whole)
    assert rebuild is not None
    del whole, tensors
    gc.collect()
    assert seen() is None
