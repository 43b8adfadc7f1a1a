"""Replicas of experts on all ranks for one forward, and the computation with them.

The weights of each hot expert are broadcast by its owner while the rank's own experts are computed;
in backward the gradients of the replicas are reduced to the owner while those of its own experts
are computed. A replica is no parameter: the owner adds what it gets to its own gradient. Every rank
has a replica of every hot expert, without rows on the owner, so that all issue the same collectives
in the same order.
"""

# N hot experts, T rows of a rank: of its own experts first, then of replicas; H hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.tensor_marks import mark
from ascend_run.types.forward import Forward, ForwardLink
from ascend_run.types.moe import ExpertWeights

from .expert_slices import StackedExperts, weights_of

_HOT: Final = "hot_experts"


def with_replicas(counts: Tensor, experts: tuple[int, ...]) -> Tensor:
    """Mark counts whose last entries are those of replicas of these experts."""
    mark(counts, **{_HOT: experts})
    return counts


class Replication:
    """Replicas of some experts in one forward, and their gradients in its backward.

    Args:
        hot: Numbers of the experts in the full model.
        weights: The stacked weights of this rank's experts.
        accumulate: Whether gradients are added to the ``main_grad`` of a weight that has one, where
            the kernel adds those of the rank's own rows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hot: Sequence[int],
        weights: Sequence[Tensor],
        *,
        accumulate: bool,
    ) -> None:
        self.group, self.weights, self.accumulate = group, weights, accumulate
        local = weights[0].shape[0]
        self.owners = [expert // local for expert in hot]
        own = [at for at, owner in enumerate(self.owners) if owner == group.rank()]
        self.own = {at: hot[at] % local for at in own}
        """Position among the hot experts -> among this rank's, of those that it owns."""
        self.pending: list[dist.Work] = []
        self.gradients: Sequence[Tensor] = ()

    def start(self) -> tuple[Tensor, ...]:
        """Issue the broadcasts. The results [N, ...] are only for ``finish``."""
        out: tuple[Tensor, ...] = _Start.apply(self, *self.weights)
        return out

    def finish(self, replicas: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Wait for what ``start`` has issued, and return it."""
        out: tuple[Tensor, ...] = _Finish.apply(self, *replicas)
        return out

    def broadcast(self) -> tuple[Tensor, ...]:
        """Issue the broadcasts of all weights, and return where they arrive."""
        return tuple(self._broadcast(weight.detach()) for weight in self.weights)

    def _broadcast(self, weight: Tensor) -> Tensor:
        replicas = weight.new_empty(len(self.owners), *weight.shape[1:])
        for at, local in self.own.items():
            replicas[at].copy_(weight[local])
        self._issue(dist.broadcast, replicas, "group_src")
        return replicas

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Issue the sums of the gradients, in place on the owners."""
        self.gradients = gradients
        for gradient in gradients:
            self._issue(dist.reduce, gradient, "group_dst")

    def _issue(self, collective: Any, stacked: Tensor, owner: str) -> None:
        for part, rank in zip(stacked.unbind(0), self.owners, strict=True):
            work = collective(part, group=self.group, async_op=True, **{owner: rank})
            self.pending.append(work)

    def wait(self) -> None:
        """Wait for what was issued last."""
        for work in self.pending:
            work.wait()
        self.pending = []

    def own_gradients(self) -> list[Tensor | None]:
        """Return the gradients of this rank's weights; None where it owns no hot expert, or where
        they were accumulated."""
        gradients, self.gradients = self.gradients, ()
        pairs = zip(self.weights, gradients, strict=True)
        return (
            [self._own_gradient(*pair) for pair in pairs] if self.own else [None] * len(gradients)
        )

    def _own_gradient(self, weight: Tensor, summed: Tensor) -> Tensor | None:
        sum_X = getattr(weight, "main_grad", None) if self.accumulate else None
        total = torch.zeros_like(weight) if sum_X is None else sum_X
        for at, local in self.own.items():
            total[local] += summed[at]
        return total if sum_X is None else None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, replication: Replication, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.replication = replication
        return replication.broadcast()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        replication: Replication = ctx.replication
        replication.wait()
        return None, *replication.own_gradients()


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, replication: Replication, *replicas: Tensor) -> tuple[Tensor, ...]:
        replication.wait()
        ctx.replication = replication
        return tuple(replica.view_as(replica) for replica in replicas)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed = tuple(gradient.contiguous() for gradient in gradients)
        ctx.replication.reduce(summed)
        return None, *summed  # kept until they are sent; ``start`` has the gradients


def replica_link(experts: StackedExperts, group: dist.ProcessGroup) -> ForwardLink:
    """Return the link around a rank's experts that computes the rows of replicas, too."""

    def wrap(inner: Forward) -> Forward:
        def forward(rows_TH: Tensor, counts: Tensor, probs_T: Tensor) -> Any:
            hot: tuple[int, ...] = getattr(counts, _HOT)
            if not hot:
                return inner(rows_TH, counts, probs_T)
            weights = [weight for weight in weights_of(experts) if weight is not None]
            accumulate = getattr(experts.compute, "accumulate", False)
            replication = Replication(group, hot, weights, accumulate=accumulate)
            own_counts, counts_N = counts.split([len(experts.fc1), len(hot)])
            sizes = [int(own_counts.sum()), int(counts_N.sum())]
            (own_rows, rows), (own_probs, probs) = rows_TH.split(sizes), probs_T.split(sizes)
            arriving = replication.start()
            own, bias = inner(own_rows, own_counts, own_probs)
            replicas = ExpertWeights(*replication.finish(arriving))
            out, _ = inner(rows, counts_N, probs, replicas)
            return torch.cat([own, out]), bias

        return forward

    return ForwardLink(wrap=wrap, compilable=False)
