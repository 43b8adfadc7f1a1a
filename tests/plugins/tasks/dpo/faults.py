"""Faults of a run with two models, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

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
