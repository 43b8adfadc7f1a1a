"""Faults of pairs without a reference, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def divide_by_the_length_twice_on_the_second_rank() -> Undo:
    from ascend_run.ops.preference_loss import Answers

    def change(inner: Any) -> Any:
        def divided(self: Any, lengths: Any) -> Any:
            found = inner(self, lengths)
            return found if dist.get_rank() != 1 else inner(found, lengths)

        return divided

    return replace(Answers, "__truediv__", change)
