"""Records of a run that never was: one parameter on two ranks, another that is frozen."""

from __future__ import annotations

import attrs
import torch

from ascend_run.tools.verify.capture.moments import Moments
from ascend_run.tools.verify.capture.projections import projections
from ascend_run.tools.verify.capture.record import Record, RecordedShard

AXES = ("tp", "pp", "cp", "dp", "ep", "expt_tp")


def records(count: int = 1, axis: str = "dp", **changes: object) -> list[Record]:
    """A run on ranks that differ along one axis and hold the same parameters."""
    return [attrs.evolve(one(rank, count, axis), **changes) for rank in range(count)]


def one(rank: int, count: int, axis: str) -> Record:
    weight = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    frozen = torch.ones(3, dtype=torch.float64)
    sizes = {**dict.fromkeys(AXES, 1), axis: count}
    return Record(
        rank=rank,
        coordinates={**dict.fromkeys(AXES, 0), axis: rank},
        sizes=sizes,
        places=[
            RecordedShard(name="a.b.weight", offset=(0, 0), global_shape=(2, 3), trains=True),
            RecordedShard(name="c.weight", offset=(0,), global_shape=(3,), trains=False),
        ],
        initial=[weight, frozen],
        gradients=[weight / 7, None],
        loss=2.5,
        num_tokens=10,
        micro_batches=4 // (count if axis == "dp" else 1),
        weights=[[(weight - 0.1 * step).float(), frozen.float()] for step in (1, 2)],
        losses=[2.5, 2.4],
        grad_norms=[1.0, 0.9],
        step_tokens=[10, 12],
        peaks=[0.5, -1.0],
        step_gradients=[
            [projections(weight / 7 / step, (0, 0), weight.shape), None] for step in (1, 2)
        ],
        generators={
            "torch": "aa",
            "tracker model-parallel-rng": f"m{rank if axis in ('tp', 'pp') else 0}",
        },
        forward={0: {"a.b|out|0": moments(1.0), "a|out|0": moments(2.0)}},
        backward={0: {"a|out|0": moments(3.0), "a.b|out|0": moments(4.0)}},
    )


def moments(value: float) -> Moments:
    """Of four elements that all have one value, in one micro-batch."""
    row = [4.0, 4 * value, 4 * value**2, 4 * value**3, 4 * value, 4 * value**3]
    return Moments(rows={0: row})
