"""The sizes are in the options of the process groups of a run on a fake NPU."""

from __future__ import annotations

from typing import Any

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.comm_options import with_comm_options
from tests.plugins.platforms.npu.stand_in import npu_on_the_cpu
from tests.support.small_runs import prepare, rank_environment

NAME = "comm-buffer-auto"
SP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


def sizes_of_groups(values: dict[str, Any]) -> list[int]:
    """Return the buffers of the groups that have options, in MiB; a job of the pool."""
    from ascend_run.core.run import prepared_rank

    with npu_on_the_cpu() as seen, rank_environment() as size:
        prepared = prepare({**DENSE, **values, "platform": "npu"}, (NAME,), size)
        with prepared_rank(with_comm_options(prepared).run_request()):
            pass
        return sorted(options.hccl_config["hccl_buffer_size"] for options in seen.options)


def test_groups_are_created_with_the_sizes_that_were_computed(gloo_pool: GlooPool) -> None:
    """Of two ranks: tp has a small message, and mp, tp_cp and tp_dp_cp a few numbers."""
    for found in gloo_pool.run(sizes_of_groups, 2, {**SP}, timeout=60):
        assert found == [2, 10, 10, 10]
    given = {f"plugins.{NAME}.sizes": {"tp": 64, "dp": 300}}
    for found in gloo_pool.run(sizes_of_groups, 2, {**SP, **given}, timeout=60):
        assert found == [10, 10, 10, 64, 300, 300]
