"""Faults of pairs of answers, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def swap_the_answers_on_the_second_rank() -> Undo:
    from ascend_run.ops.preference_loss import Answers

    def change(inner: Any) -> Any:
        def of_documents(cls: Any, values_D: Any) -> Any:
            found = inner(values_D)
            if dist.get_rank() != 1:
                return found
            return cls(chosen_P=found.rejected_P, rejected_P=found.chosen_P)

        return classmethod(of_documents)

    return replace(Answers, "of_documents", change)
