"""Vocabulary-parallel losses on a rank: every rank draws the same full tensors."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.linear import vocabulary_shard
from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy
from tests.ops.elementwise.elementwise import draw


@attrs.frozen(kw_only=True)
class Problem:
    tokens: int = 11
    hidden: int = 6
    vocabulary: int = 12
    split: tuple[int, ...] = (6, 6)
    """Rows of each rank."""
    chunk_bytes: int = 2**20
    dtype: torch.dtype = torch.float64

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return hidden [T, H], weight [V, H], labels [T], mask [T]."""
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        mask = torch.rand(self.tokens, generator=generator, dtype=torch.float64)
        mask[::4] = 0.0
        return (
            draw(self.tokens, self.hidden, seed=1, dtype=self.dtype),
            draw(self.vocabulary, self.hidden, seed=2, dtype=self.dtype),
            labels,
            mask,
        )


@attrs.frozen
class Parts:
    """One rank's results: the sum, its contribution to the hidden gradient, its rows' gradient."""

    fused: Tensor
    from_logits: Tensor
    dhidden: Tensor
    dweight: Tensor
    dlogits: Tensor
    capped: tuple[Tensor, ...]
    """With a softcap of 0.8: the sum and both gradients."""


def vocabulary_parallel(problem: Problem) -> Parts:
    hidden, weight, labels, mask = problem.tensors()
    rows = weight.detach().split(problem.split)[dist.get_rank()].clone().requires_grad_()
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_shard, "CHUNK_BYTES", problem.chunk_bytes)
        fused = linear_cross_entropy(hidden, rows, labels, mask, tp_group=group)
        low = linear_cross_entropy(hidden, rows, labels, mask, tp_group=group, softcap=0.8)
    capped = (low.detach(), *torch.autograd.grad(2 * low, [hidden, rows]))
    dhidden, dweight = torch.autograd.grad(2 * fused, [hidden, rows])
    logits = (hidden @ rows.t()).detach().requires_grad_()
    from_logits = vocab_cross_entropy(logits, labels, mask, tp_group=group)
    (dlogits,) = torch.autograd.grad(2 * from_logits, [logits])
    return Parts(fused.detach(), from_logits.detach(), dhidden, dweight, dlogits, capped)
