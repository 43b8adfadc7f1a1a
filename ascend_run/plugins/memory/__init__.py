"""Placement of activations that are saved for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_run.ops.recomputed import RandomState


def random_state() -> RandomState:
    """Return a context with the present state of all random generators, those of the parallel ranks
    included; after it they have the state of before it."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()

    def read() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()

    def write(cpu: torch.Tensor, device: torch.Tensor, ranks: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(device)
        tracker.set_states(ranks)

    earlier = read()

    @contextmanager
    def state() -> Iterator[None]:
        own = read()
        write(*earlier)
        try:
            yield
        finally:
            write(*own)

    return state
