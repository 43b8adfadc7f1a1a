"""What is counted as left allocated for backward."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor, nn

from ascend_run.testing.effects import count_both
from ascend_run.testing.pool import GlooPool


def saved_bytes(held_for: float) -> int:
    """A job of the pool: of a linear behind a collective, whose input another thread holds on to
    for some seconds, as gloo's do."""
    from ascend_run.tools.verify.capture.activity import Observer

    linear, observer = nn.Linear(8, 8, bias=False), Observer()
    holder = threading.Thread(target=_hold, args=(held := [torch.zeros(0)], held_for))
    with count_both(observer.see):
        held[0] = torch.ones(1, 8) * 2
        torch.distributed.all_reduce(held[0])
        holder.start()
        linear(held[0].clone()).square().sum().backward()
    holder.join()
    return observer.saved_bytes


def _hold(held: list[Tensor], seconds: float) -> None:
    time.sleep(seconds)
    held.clear()


def test_what_another_thread_releases_a_moment_later_is_not_saved(gloo_pool: GlooPool) -> None:
    at_once, later = (gloo_pool.run(saved_bytes, 1, seconds)[0] for seconds in (0.0, 0.03))
    assert later == at_once > 0
