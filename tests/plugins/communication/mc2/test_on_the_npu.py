"""Linears by the NPU's operators, on reference kernels and gloo ranks, against the plain run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ascend_run.testing.models import DENSE
from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial

from .npu_linears import NpuLinears

LAYERS, MICRO_BATCHES = 2, 4
PASSES = LAYERS * MICRO_BATCHES
WIDE = {"model.hidden_size": 512, "model.ffn_hidden_size": 512}
"""Large enough that every matmul is within the operators' limits on two ranks."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with offered(NpuLinears):
        yield


def test_matmuls_with_collectives_are_the_npus_operators(parity: Parity) -> None:
    """Forward all-gather and reduce-scatter in attention and MLP each, backward two all-gathers."""
    outcomes = parity("mc2", beside=("npu-linears",), layout={"tp": 2}, config=WIDE)
    for outcome in outcomes:
        assert outcome.operations["npu_all_gather_base_mm"] == 4 * PASSES
        assert outcome.operations["npu_mm_reduce_scatter_base"] == 2 * PASSES
        assert "send" not in outcome.collectives


def test_what_is_too_narrow_for_them_goes_round_the_ring(parity: Parity) -> None:
    for outcome in parity("mc2", beside=("npu-linears",), layout={"tp": 2}):
        assert "npu_all_gather_base_mm" not in outcome.operations
        assert outcome.collectives["send"] > 0


def test_without_sequence_parallelism_sums_are_the_npus_operator(gloo_pool: GlooPool) -> None:
    config = {**DENSE, "parallel.tensor_model_parallel_size": 2}
    ours, plain = (
        gloo_pool.run(run_trial, 2, Trial(plugins=plugins, config=config))[0]
        for plugins in (("npu-linears", "mc2"), ())
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert ours.operations["npu_mm_all_reduce_base"] == 2 * PASSES


@pytest.mark.needs_plugins("matmul-add")
def test_gradients_of_weights_are_added_by_the_npus_operator(gloo_pool: GlooPool) -> None:
    """In half precision, its purpose; the sums equal those of the CPU's own matmul."""

    def gradients(*plugins: str) -> tuple[dict[str, torch.Tensor], int]:
        config = {**DENSE, "train.precision": "bf16"}  # so gradients accumulate in float32
        trial = Trial(plugins=plugins, config=config, dtype="bfloat16")
        (outcome,) = gloo_pool.run(run_trial, 1, trial)
        shards = {p.name: p.tensor for p in outcome.shards if p.tensor is not None}
        return shards, outcome.operations.get("npu_grouped_matmul_add_", 0)

    ours, calls = gradients("npu-linears", "matmul-add")
    plain, none = gradients("matmul-add")
    assert (calls, none) == (4 * PASSES, 0)  # linears of a layer
    assert ours.keys() == plain.keys()
    for name, tensor in plain.items():
        apart = (ours[name] - tensor).abs().max() / tensor.abs().max()
        assert apart < 1e-5, name
