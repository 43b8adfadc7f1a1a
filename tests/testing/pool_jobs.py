"""What the pool's own tests run on its ranks."""

from __future__ import annotations

import os
import signal
import sys
import time

import attrs
import numpy as np
import torch
from torch import distributed


def sum_of_ranks() -> tuple[int, int, float]:
    total = torch.tensor(float(distributed.get_rank()))
    distributed.all_reduce(total)
    return distributed.get_rank(), distributed.get_world_size(), total.item()


def process_id() -> int:
    return os.getpid()


@attrs.frozen
class Origin:
    """What a rank has from the process that it is a fork of, or has not."""

    parent: int
    hash_of_text: int
    draw_of_numpy: float
    interrupts: bool
    """Whether SIGINT raises KeyboardInterrupt."""


def origin() -> Origin:
    return Origin(
        parent=os.getppid(),
        hash_of_text=hash("a text"),
        draw_of_numpy=np.random.random(),
        interrupts=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    )


def command_line() -> str:
    return " ".join(sys.orig_argv)


def surroundings() -> tuple[str, str, int]:
    return os.getcwd(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def in_a_new_group() -> int:
    distributed.new_group([0, 1])
    distributed.new_group([2, 3])
    return os.getpid()


def double(tensor: torch.Tensor, *, factor: int = 2) -> torch.Tensor:
    return tensor * factor


def fail_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise LookupError("planted failure")
    distributed.all_reduce(torch.ones(1))


def hang_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        os._exit(7)
    distributed.all_reduce(torch.ones(1))


def leave_traces() -> None:
    os.environ["ASCEND_RUN_POOL_TRACE"] = "left"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)


def traces() -> tuple[str | None, str, float]:
    draw = torch.rand(1).item()
    return os.environ.get("ASCEND_RUN_POOL_TRACE"), str(torch.get_default_dtype()), draw


def unpicklable() -> object:
    return lambda: None
