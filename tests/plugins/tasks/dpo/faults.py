"""Faults of a run with two models, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def skip_the_reference() -> Undo:
    from ascend_run.core.train.frozen import FrozenForward

    def change(inner: Any) -> Any:
        return lambda self, batches, seq_length, micro_batch_size: [*batches]

    return replace(FrozenForward, "__call__", change)


def let_the_policy_be_the_reference() -> Undo:
    from ascend_run.core.train.frozen import FrozenForward

    def change(inner: Any) -> Any:
        def build(self: Any, hooks: Any, context: Any, role: Any, trained: Any) -> None:
            inner(self, hooks, context, role, trained)
            self._bundle = trained

        return build

    return replace(FrozenForward, "__init__", change)


def sum_gradients_of_documents_over_ranks() -> Undo:
    """A rank's tokens get the gradient once for each rank that shares the sequence."""
    from ascend_run.ops.transfer import document_sums

    def change(inner: Any) -> Any:
        def backward(ctx: Any, dy: Any) -> tuple[Any, None]:
            return dy * dist.get_world_size(), None

        return staticmethod(backward)

    return replace(document_sums._SumOverRanks, "backward", change)


def keep_sums_of_documents_to_oneself() -> Undo:
    from ascend_run.ops.transfer import document_sums

    def change(inner: Any) -> Any:
        return staticmethod(lambda ctx, x, group: x.clone())

    return replace(document_sums._SumOverRanks, "forward", change)
