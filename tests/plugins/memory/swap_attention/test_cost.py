"""The plugin moves as many bytes as its plan says."""

from __future__ import annotations

from pathlib import Path

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import planned


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
