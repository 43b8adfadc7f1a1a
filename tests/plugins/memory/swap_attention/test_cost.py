"""The plugin moves as many bytes as its plan says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import Storage
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import planned
from tests.support.file_traffic import file_traffic


def test_the_bytes_that_leave_are_those_that_are_expected_on_the_host(
    gloo_pool: GlooPool,
) -> None:
    # As planned; what the attention of a GPU saves in float32 is in no plan.
    sizes = {"plugins.swap-attention.min_bytes": 1, "train.global_batch_size": 1}
    config = {**DENSE, **sizes, "platform": "cpu"}
    _, (cost,) = planned(config, ("swap-attention",))

    trial = Trial(plugins=("swap-attention",), config=config, steps=2)
    (outcome,) = gloo_pool.run(run_trial, 1, trial)

    (to_host,) = cost.changes["swap-attention"].saved
    expected = sum(
        tensor.nbytes
        for layer in cost.rank.layers
        for tensor in cost.rank.saved[layer]
        if tensor.part == "self_attention"
    )
    assert to_host.tensors == ("self_attention.*",)
    assert outcome.metrics["swap-attention/swap_bytes"] == expected


def test_the_modules_and_the_layers_that_are_named_are_those_that_change() -> None:
    config = {
        **DENSE,
        "plugins.swap-attention.modules": ["self_attention", "pre_mlp_layernorm"],
        "plugins.swap-attention.recompute_mlp_layers": 1,
    }
    _, (plain,) = planned(DENSE)
    _, (cost,) = planned(config, ("swap-attention",))
    change = cost.changes["swap-attention"]
    assert change.saved[0].tensors == ("self_attention.*", "mlp_norm.*")
    weights = 3 * 32 * 48
    assert cost.flops - plain.flops == 2 * weights * 16 * 4


def test_what_goes_to_files_is_in_no_memory(tmp_path: Path) -> None:
    """On the CPU all that goes to host memory counts as before, though it exists twice where it is
    prefetched."""
    config = {**DENSE, "data.seq_length": 64, "model.num_layers": 4, "train.global_batch_size": 1}
    swapping = {**config, "plugins.swap-attention.min_bytes": 1}
    in_files = {**swapping, "plugins.swap-attention.folder": str(tmp_path)}
    _, (plain,) = planned(config)
    _, (in_memory,) = planned(swapping, ("swap-attention",))
    _, (cost,) = planned(in_files, ("swap-attention",))
    offloaded = sum(
        tensor.nbytes
        for tensors in cost.rank.saved.values()
        for tensor in tensors
        if tensor.part == "self_attention"
    )
    assert in_memory.memory.activations - cost.memory.activations == offloaded > 0
    assert in_memory.memory.activations > plain.memory.activations > cost.memory.activations
    assert cost.memory.host == 0


PP2 = {"parallel.pipeline_model_parallel_size": 2, "model.num_layers": 4}
PP3 = {"parallel.pipeline_model_parallel_size": 3, "model.num_layers": 6}


@pytest.mark.exhaustive(by=lambda values: ())
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({}, 1, id="prefetched"),
        pytest.param({"plugins.swap-attention.prefetch": 0}, 1, id="not prefetched"),
        pytest.param(PP2, 2, id="pp2"),
        pytest.param({**PP2, "plugins.swap-attention.prefetch": 0}, 2, id="pp2, not prefetched"),
        pytest.param(PP3, 3, id="pp3"),
    ],
)
def test_a_step_writes_and_reads_the_bytes_of_the_plan(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    """Of every stage: which layers are still there in backward depends on the schedule."""
    own = {"min_bytes": 1, "folder": str(tmp_path)}
    options = {f"plugins.swap-attention.{name}": value for name, value in own.items()}
    config = {**DENSE, **options, **values, "platform": "cpu", "train.global_batch_size": 6}
    _, costs = planned(config, ("swap-attention",), ranks)

    found = gloo_pool.run(file_traffic, ranks, config, ("swap-attention",), 3)

    in_files = [cost.offloaded[Storage.FILE] for cost in costs]
    plan = [(activations.left, activations.returned) for activations in in_files]
    assert plan == [(traffic.written, traffic.read) for traffic in found]
    assert all(read < written for written, read in plan)
