"""Optimizer steps of a trial on the ranks of a pool, with the gradients of the last one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.testing.kit import rank_environment, raw_config
from ascend_run.testing.parity import compare
from ascend_run.testing.runtime import RankOutcome, Trial

if TYPE_CHECKING:
    from torch import Tensor

WORK: Final[Mapping[str, Sequence[str]]] = {
    "matmuls": ("_linear_pointwise", "addmm", "bmm", "mm"),
    "dropouts": ("bernoulli_", "native_dropout"),
    "activations": ("silu",),
    "norms": ("rsqrt_",),
    "copies": ("copy_",),
    "freed storages": ("set_",),
    "updates": ("_fused_adamw_",),
}
"""Work of a step -> operations of torch's dispatcher that do it."""


@attrs.frozen
class Trained:
    """One rank after the last step."""

    outcome: RankOutcome
    """Losses and gradient norms of all steps, and weights; operations of the last step."""
    gradients: Mapping[str, Tensor]
    """Name and offset of a shard -> gradient of the last step, as this rank has it."""
    file_bytes: int
    """Bytes of the optimizer's states that are in memory-mapped files."""


def trained(trial: Trial) -> Trained:
    """A job: run the steps of a trial as the kit does, and read the gradients too."""
    import torch.distributed as dist

    from ascend_run.core.run import prepared_rank
    from ascend_run.core.train.seeding import seed_everything
    from ascend_run.prepare.prepare import prepare_rank
    from ascend_run.testing.dry_run import gradient_of
    from ascend_run.testing.trial_work import TrialWork

    rank, size = dist.get_rank(), dist.get_world_size()
    with rank_environment(rank, size):
        prepared = prepare_rank(raw_config(trial), size)
        with prepared_rank(prepared.run_request()) as (hooks, context):
            seed_everything(context.config, context.layout)
            work = TrialWork(trial, hooks, context)
            outcome = work.train()
            shards = work.dry_run.shards(gradient_of)
            gradients = {
                f"{s.name} {s.offset}": s.tensor.clone() for s in shards if s.tensor is not None
            }
            return Trained(outcome, gradients, _file_bytes(work.dry_run.bundle.optimizer))


def _file_bytes(optimizer: object) -> int:
    from ascend_run.ops.optimizer_states import torch_optimizers

    states = [states for one in torch_optimizers(optimizer) for states in one.state.values()]
    tensors = [
        state for of_one in states for state in of_one.values() if hasattr(state, "data_ptr")
    ]
    mapped = [*_mapped_files()]
    return sum(t.nbytes for t in tensors if any(t.data_ptr() in one for one in mapped))


def _mapped_files() -> Iterator[range]:
    """Yield the addresses of files that have no name any more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("(deleted)"):
            start, end = line.partition(" ")[0].split("-")
            yield range(int(start, 16), int(end, 16))


def differences(found: Sequence[Trained], expected: Sequence[Trained]) -> Iterator[str]:
    """Yield a message for everything that is not equal in every bit, rank by rank."""
    import torch

    yield from compare([one.outcome for one in found], [one.outcome for one in expected], 0.0)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in sorted({*one.gradients, *other.gradients}):
            ours, wanted = one.gradients.get(name), other.gradients.get(name)
            if ours is None or wanted is None:
                yield f"rank {rank}: one run only has a gradient of {name}"
            elif ours.dtype != wanted.dtype or not torch.equal(ours, wanted):
                yield f"rank {rank}: the gradient of {name} in the last step differs"


def emptiness(reference: Sequence[Trained], steps: int) -> Iterator[str]:
    """Yield why equality with a reference would show nothing."""
    for rank, one in enumerate(reference):
        losses = one.outcome.losses
        if len({*losses}) < steps or not all(map(math.isfinite, losses)):
            yield f"rank {rank}: the losses of {steps} steps are {losses}"
        if not any(one.outcome.operations.get(name) for name in WORK["dropouts"]):
            yield f"rank {rank}: nothing is dropped"
        if not any(bool(gradient.any()) for gradient in one.gradients.values()):
            yield f"rank {rank}: every gradient is zero"


def effect(found: Sequence[Trained], without: Sequence[Trained]) -> Mapping[str, float]:
    """Return what the last step of one run did more than that of another, on all ranks together:
    calls of operations, collectives, what plugins count, bytes of states in files."""
    more = _work(found)
    more.subtract(_work(without))
    return {name: more[name] for name in sorted(more) if more[name]}


def _work(ranks: Sequence[Trained]) -> Counter[str]:
    work: Counter[str] = Counter()
    for one in ranks:
        counts = one.outcome.operations
        work.update({what: sum(counts.get(n, 0) for n in names) for what, names in WORK.items()})
        work["collectives"] += sum(one.outcome.collectives.values())
        work["bytes in files"] += one.file_bytes
        work.update(dict(one.outcome.metrics))  # type: ignore[arg-type]
    return work
