"""Forwards that wait for their backward, under Megatron's schedules."""

from __future__ import annotations

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.tools.plan.cost_model.schedule import in_flight
from tests.support.costs import planned

PP = "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(("pp_rank", "waiting"), [(0, 4), (1, 3), (3, 1)])
def test_a_stage_runs_ahead_by_the_stages_after_it(pp_rank: int, waiting: int) -> None:
    config = {**DENSE, PP: 4, "model.num_layers": 4, "train.global_batch_size": 8}
    prepared, _ = planned(config, world_size=4)
    (only,) = in_flight(prepared.config, prepared.layout, pp_rank, 8)
    assert only.forwards == {0: waiting}
    (few,) = in_flight(prepared.config, prepared.layout, pp_rank, 2)
    assert few.forwards == {0: min(2, waiting)}


def test_an_interleaved_stage_has_its_warm_up_waiting_and_one_more() -> None:
    config = {**DENSE, PP: 2, VPP: 2, "model.num_layers": 4, "train.global_batch_size": 8}
    prepared, _ = planned(config, world_size=2)
    for pp_rank, most in ((0, 2 + 2 + 1), (1, 2 + 1)):
        found = in_flight(prepared.config, prepared.layout, pp_rank, 8)
        assert max(sum(w.forwards.values()) for w in found) == most
        assert {w.chunk for w in found} == {0, 1}
        assert all(w.forwards[w.chunk] >= 1 for w in found)
