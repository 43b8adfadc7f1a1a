"""Faults of a model with a score head, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def sum_gradients_of_scores_over_tensor_ranks() -> Undo:
    """As a column-parallel linear needs it; every rank has the full gradient already."""
    from ascend_run.core.model.gpt import GPT

    def change(inner: Any) -> Any:
        return lambda self, hidden, *, sums=True: inner(self, hidden, sums=True)

    return replace(GPT, "_gathered_hidden", change)


def score_another_token_on_the_second_rank() -> Undo:
    from ascend_run.ops.linear.score_head import ScoreHead

    def change(inner: Any) -> Any:
        def forward(self: Any, hidden: Any, mask: Any) -> Any:
            return inner(self, hidden, mask if dist.get_rank() != 1 else mask.roll(-1, 1))

        return forward

    return replace(ScoreHead, "forward", change)


def draw_another_head_on_the_second_rank() -> Undo:
    from ascend_run.core.model import initialization

    def change(inner: Any) -> Any:
        def draw(key: str, shape: Any, std: float, seed: int) -> Any:
            return inner(key, shape, std, seed + (key == "score.weight") * dist.get_rank())

        return draw

    return replace(initialization, "_draw", change)
