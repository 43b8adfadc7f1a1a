"""What the benchmarks of memory count as live at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.transfer.file_copier import FileCopier
from benchmarks.live_storages import LiveStorages

NUMEL, ITEM = 1000, 4


class _Doubled(torch.autograd.Function):
    """Twice the input; its gradient is shown to ``see``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        ctx.see = see
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = dy * 2
        ctx.see(dx)
        return dx, None


@pytest.mark.parametrize(("is_held", "at_once"), [(False, 2), (True, 3)])
def test_autograd_adds_to_a_gradient_that_nothing_else_holds(is_held: bool, at_once: int) -> None:
    """The sum of two gradients is a third tensor only if something else holds the first one."""
    x, held = torch.ones(NUMEL, requires_grad=True), []
    loss = (x * 3).sum()
    loss = loss + _Doubled.apply(x, held.append if is_held else str).sum()  # back first
    with LiveStorages([x]) as seen:
        loss.backward()
    assert len(held) == is_held
    assert (seen.peak - x.nbytes) // (NUMEL * ITEM) == at_once


def test_tensors_in_files_take_no_memory(tmp_path: Path) -> None:
    """Files that were there before, new ones, and views of either."""
    x, copier = torch.ones(NUMEL), FileCopier(str(tmp_path))
    before = copier.to_host(x)
    with LiveStorages([x, before]) as seen:
        new = copier.to_host(x)
        views = before[1:], new[1:]
        copied = new.clone()
    assert torch.equal(copied, before)
    assert len(views) == 2
    assert seen.peak == 2 * NUMEL * ITEM
