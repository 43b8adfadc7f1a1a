"""Code that runs on the ranks of ``optimizer_states_worker``; can be imported without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class Held:
    """Bytes of all storages on one rank, between steps; those of several tensors count once."""

    built: int
    """Before the first step, which creates the moments."""
    trained: int
    """After steps, without gradients outside of buffers."""


def hold(values: Mapping[str, Any], enable: Sequence[str], steps: int) -> Held:
    """Train some steps; called on every rank of a default process group."""
    from ascend_run.testing.dry_run import DryRun
    from ascend_run.testing.models import samples

    from .memory_run import run_of_rank

    before = live_bytes()
    with run_of_rank(values, enable) as (hooks, context):
        dry_run = DryRun(hooks, context)
        dry_run.build()
        step = dry_run.train_step()
        batches = dry_run.batches(samples(values, steps * context.config.train.global_batch_size))
        built = live_bytes() - before
        for _ in range(steps):
            dry_run.step(step, batches)
        dry_run.bundle.optimizer.zero_grad()
        return Held(built, live_bytes() - before)


def live_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python knows in this process."""
    import gc

    import torch

    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())
