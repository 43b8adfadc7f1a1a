"""The terms of a loss are functions of the weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ascend_run.testing.pool import GlooPool


class Counting(nn.Module):
    """A chunk with state that changes in each run, as the bias of a router does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()), persistent=False)

    def zero_grad_buffer(self) -> None: ...


def measured_twice() -> list[tuple[float, ...]]:
    """A job of the pool: the loss is the number of runs that the chunk remembers."""
    from ascend_run.core.train.totals import LossTotals
    from ascend_run.testing.gradients.loss_terms import LossTerms

    chunk = Counting()

    def forward_backward(batches: Iterator[Any], count: int, *, forward_only: bool) -> Any:
        chunk.runs += 1
        return LossTotals((float(chunk.runs), 1.0, 1.0), ())

    dry_run = cast("Any", SimpleNamespace(bundle=SimpleNamespace(chunks=[chunk])))
    terms = LossTerms(dry_run, cast("Any", forward_backward), batches=())
    return [terms.values(), terms.values()]


def test_every_run_begins_with_the_same_buffers(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(measured_twice, 1, timeout=300) == [[(1.0,), (1.0,)]]
