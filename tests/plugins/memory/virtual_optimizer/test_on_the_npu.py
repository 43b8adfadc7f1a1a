"""Steps and checkpoints on a fake NPU, whose memory of the host few operators take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.ops.optimizer_states import torch_optimizers
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import TRAINED_TOLERANCE, compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome
from tests.plugins.platforms.npu.reference.swapped_memory import Swapped
from tests.plugins.platforms.npu.stand_in import npu_on_the_cpu
from tests.support.costs import planned
from tests.support.small_runs import Values, outcome_of, training
from tests.support.state_runs import BF16, DISTRIBUTED, FP32
from tests.support.stepping_jobs import continued, saved, shards_of

NAME: Final = ("virtual-optimizer",)
SIZE: Final = "plugins.virtual-optimizer.size"
MOMENTS: Final = 8
"""Bytes of an element's states."""


def stepped(values: Values, enable: Sequence[str], steps: int) -> tuple[RankOutcome, int]:
    """Take steps on the platform's device; return the shards of a checkpoint, and the bytes of
    states in memory of the host. A job of the pool."""
    with npu_on_the_cpu(), training({**values, "platform": "npu"}, enable) as run:
        for _ in range(steps):
            run.step()
        optimizers = torch_optimizers(run.bundle.optimizer)
        held = [s for one in optimizers for of_p in one.state.values() for s in of_p.values()]
        on_host = sum(state.nbytes for state in held if isinstance(state, Swapped))
        with shards_of(run) as shards:
            return outcome_of(shards), on_host


def on_the_npu(job: Callable[..., Any], values: Values, *arguments: Any) -> Any:
    with npu_on_the_cpu():
        return job({**values, "platform": "npu"}, *arguments)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **FP32, "train.global_batch_size": 2}, 1, id="fp32"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, id="bf16 dp2 distributed"),
    ],
)
def test_states_are_on_the_host_and_steps_are_those_without(
    gloo_pool: GlooPool, values: Values, ranks: int
) -> None:
    """The kernels round differently, so values agree within a tolerance."""
    plain, ours = (gloo_pool.run(stepped, ranks, values, names, 5) for names in ((), NAME))
    outcomes, without = ([outcome for outcome, _ in one] for one in (ours, plain))
    assert [*compare(outcomes, without, TRAINED_TOLERANCE)] == []
    _, (cost,) = planned({**values, "platform": "npu"}, NAME, ranks)
    assert [size for _, size in plain] == [0] * ranks
    assert sum(size for _, size in ours) == MOMENTS * cost.trained_parameters


def test_states_without_room_are_updated_on_the_device(gloo_pool: GlooPool) -> None:
    """Beside those on the host, in the same step."""
    size = 50_000
    values = {**DENSE, **BF16}
    ((plain, _),) = gloo_pool.run(stepped, 1, values, (), 5)
    ((ours, on_host),) = gloo_pool.run(stepped, 1, {**values, SIZE: [size / 2**30]}, NAME, 5)
    assert [*compare([ours], [plain], TRAINED_TOLERANCE)] == []
    assert 0.9 * size < on_host <= size


@pytest.mark.exhaustive(by=lambda ours_first: ())
@pytest.mark.parametrize("ours_first", [True, False], ids=["from ours", "into ours"])
def test_a_checkpoint_is_loaded_in_every_bit(
    gloo_pool: GlooPool, tmp_path: Path, ours_first: bool
) -> None:
    """Without the plugin, or with it; further steps are those without."""
    begun, resumed = (NAME, ()) if ours_first else ((), NAME)
    values, steps = {**DENSE, **BF16}, 2
    ends = []
    for name, enable in (("ours", (begun, resumed)), ("plain", ((), ()))):
        run = (str(tmp_path / name), steps)
        written = gloo_pool.run(on_the_npu, 1, saved, values, enable[0], *run)
        ((before, after),) = gloo_pool.run(on_the_npu, 1, continued, values, enable[1], *run)
        assert [*compare([before], written, 0.0)] == []
        ends.append([after])
    assert [*compare(*ends, TRAINED_TOLERANCE)] == []
