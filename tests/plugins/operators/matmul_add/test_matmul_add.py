"""Fused weight gradient accumulation against the run without, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from ascend_run.plugin_api import Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.operators.matmul_add import MatmulAdd
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.needed_plugins import case

LAYERS, LINEARS, MICRO_BATCHES = 2, 4, 4


def added(outcome: RankOutcome) -> int:
    return outcome.operations.get("addmm_", 0)


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(parity: Parity, layout: dict[str, int]) -> None:
    """One accumulation for each linear and micro-batch, if data parallelism has a buffer."""
    for outcome in parity("matmul-add", layout=layout):
        layers = LAYERS // layout.get("pp", 1)
        assert added(outcome) == layers * LINEARS * MICRO_BATCHES // layout["dp"]


def test_without_a_buffer_gradients_are_tensors_of_their_own(parity: Parity) -> None:
    (outcome,) = parity("matmul-add")
    assert added(outcome) == 0


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_collectives_are_those_of_megatron(gloo_pool: GlooPool, sequence_parallel: bool) -> None:
    layout = {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": sequence_parallel,
    }

    def trial(*plugins: str) -> RankOutcome:
        run = Trial(plugins=plugins, config={**DENSE, **layout})
        return gloo_pool.run(run_trial, 2, run)[0]

    ours, megatrons = trial("matmul-add"), trial()
    assert ours.collectives == megatrons.collectives
    assert ours.sent_bytes == megatrons.sent_bytes


@pytest.mark.exhaustive(by=lambda model: [model])
@pytest.mark.parametrize(
    ("beside", "model", "layout"),
    [
        ((), "moe", {"dp": 2, "ep": 2}),
        case(("lora",), "dense", {"dp": 2}),
        case(("coc",), "dense", {"tp": 2, "dp": 2}),
        case(("mc2",), "dense", {"tp": 2, "dp": 2}),
    ],
    ids=str,
)
def test_it_goes_with_other_plugins_and_layouts(
    parity: Parity, beside: tuple[str, ...], model: str, layout: dict[str, int]
) -> None:
    options = {"plugins.lora.export": False}
    outcomes = parity("matmul-add", beside=beside, model=model, layout=layout, options=options)
    for outcome in outcomes:
        # Weights with adapters are frozen, and have no gradient to accumulate.
        assert (added(outcome) > 0) == ("lora" not in beside)


@pytest.mark.exhaustive(by=lambda config: [len(config)])
@pytest.mark.parametrize(
    "config",
    [
        {"model.add_bias_linear": True, "model.normalization": "LayerNorm"},
        {"model.share_embeddings_and_output_weights": True},
        {"ddp.overlap_grad_reduce": True, "ddp.use_distributed_optimizer": True},
    ],
    ids=lambda config: "+".join(key.partition(".")[2] for key in config),
)
def test_other_models_and_reductions_are_kept_too(
    parity: Parity, config: dict[str, object]
) -> None:
    for outcome in parity("matmul-add", layout={"dp": 2}, config=config):
        assert added(outcome) > 0


def test_in_half_precision_gradients_are_nearer_to_float64(gloo_pool: GlooPool) -> None:
    """The matmul accumulates into the float32 buffer unrounded; on one rank too, which has one
    there."""
    weight = "decoder.layers.0.mlp.linear_fc1.weight"

    def gradient(dtype: str, *plugins: str) -> torch.Tensor:
        precision = {} if dtype == "float64" else {"train.precision": "bf16"}
        trial = Trial(plugins=plugins, config={**DENSE, **precision}, dtype=dtype)
        (outcome,) = gloo_pool.run(run_trial, 1, trial)
        shards = {shard.name: shard.tensor for shard in outcome.shards}
        found = shards[weight]
        assert found is not None
        return found.double()

    exact = gradient("float64")
    plain, fused = gradient("bfloat16"), gradient("bfloat16", "matmul-add")
    assert 0 < (fused - exact).norm() <= (plain - exact).norm()
    assert not torch.equal(fused, plain)


def test_it_says_what_it_is() -> None:
    assert MatmulAdd.manifest.numerics is Numerics.ROUNDING
    assert claims_of(MatmulAdd) == ()
