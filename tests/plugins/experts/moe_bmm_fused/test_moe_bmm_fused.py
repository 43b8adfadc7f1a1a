"""Runs whose experts exchange tokens within their matmuls, against the run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.moe_bmm_fused import MoeBmmFused
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import TRAINED_TOLERANCE, Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import differences as tensor_differences
from ascend_run.testing.tensors import full_tensors
from tests.support.communication import differences
from tests.support.costs import calls, planned, sent_bytes
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.tiny_options import planned_with

NAME: Final = "moe-bmm-fused"
FACTOR, PAD = "model.moe_expert_capacity_factor", "model.moe_pad_expert_input_to_capacity"
DROPS: Final = {FACTOR: 0.8, PAD: True}
KEEPS: Final = {FACTOR: 1.99, PAD: True}
"""Drops nothing, so that the result does not depend on which ranks have which tokens."""
FIRST: Final = {**DROPS, "model.moe_token_drop_policy": "position"}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
OVERLAPPED: Final = {**SHARED, "model.moe_shared_expert_overlap": True}
EP: Final = "parallel.expert_model_parallel_size"
ON_TWO: Final = {EP: 2}
SHARDED: Final = {
    EP: 2,
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "parallel.expert_tensor_parallel_size": 2,
}
FUSION: Final = "plugins.moe-bmm-fused.gradient_accumulation_fusion"
LAYERS: Final = 2
MATMULS: Final = 6
"""Two in forward and four in backward."""


@pytest.mark.exhaustive(by=lambda beside: beside)
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {"dp": 2, "ep": 2}, {**DROPS, **SHARED}),
        ((), {"dp": 2, "ep": 2}, FIRST),
        ((), {"dp": 4, "ep": 4}, {**DROPS, **OVERLAPPED}),
        ((), {"pp": 2, "dp": 2, "ep": 2}, DROPS),
        ((), {"tp": 2, "ep": 2}, KEEPS),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {**KEEPS, **SHARED}),
        ((), {"dp": 2, "ep": 2}, {**DROPS, "model.add_expert_bias": True}),
        ((), {"dp": 2, "ep": 2}, {**DROPS, "model.activation": "gelu"}),
        case(("moe-permute-fusion",), {"dp": 2, "ep": 2}, DROPS),
        case(("moe-tp-extend-ep",), {"tp": 2, "ep": 2}, KEEPS),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    parity(NAME, beside=beside, model="moe", layout=layout, config=config)


def test_experts_multiply_once_and_exchange_no_weights(parity: Parity) -> None:
    """Of six all-to-alls of a layer and micro-batch, two are of the weights and their gradients."""
    layout = {"dp": 2, "ep": 2}
    outcomes = parity(NAME, model="moe", layout=layout, config=DROPS)
    plain = parity.outcomes(Case(plugins=(), model="moe", layout=layout, config=DROPS))
    for outcome, without in zip(outcomes, plain, strict=True):
        runs = outcome.collectives["alltoall_base_"] // 4
        assert runs > 0
        assert without.collectives["alltoall_base_"] == 6 * runs
        more = outcome.operations["bmm"] - without.operations.get("bmm", 0)
        assert more == MATMULS * runs


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}], ids=str
)
def test_gradients_that_are_added_to_their_buffer_are_the_same(
    parity: Parity, layout: dict[str, int]
) -> None:
    outcomes = parity(NAME, model="moe", layout=layout, config=KEEPS, options={FUSION: True})
    for outcome in outcomes:
        assert outcome.operations["baddbmm_"] >= 2 * LAYERS


def test_recomputed_layers_exchange_their_tokens_again(parity: Parity) -> None:
    recomputed = {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]}
    parity(NAME, model="moe", layout={"dp": 2, "ep": 2}, config={**DROPS, **recomputed})


@pytest.mark.exhaustive(by=lambda layout: ())
@pytest.mark.parametrize(
    ("layout", "precision"),
    [(ON_TWO, "fp32"), (SHARDED, "fp32"), (SHARDED, "bf16")],
    ids=["ep", "ep and expert tp", "ep and expert tp, bf16"],
)
def test_communication_matches_the_cost_model(
    gloo_pool: GlooPool, layout: dict[str, Any], precision: str
) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    values = {**MOE, **longer, **DROPS, **layout, "train.precision": precision}
    assert differences(gloo_pool, values, (NAME,)) == []


def test_the_volume_is_that_of_the_page() -> None:
    """Of R rows of a rank: 4 R H in all-to-alls; R H and 2 R H between two tensor-parallel
    ranks."""
    values = {**MOE, **SHARDED, FACTOR: 1.0, PAD: True, "train.global_batch_size": 2}
    _, (cost,) = planned(values, (NAME,), 4)
    own = LAYERS * 8 * 2 * 32 * 4  # tokens of a rank, top-k, H, float32
    assert sent_bytes(cost, "all_to_all", "ep") == 4 * own
    assert calls(cost, "all_to_all", "ep") == 4 * LAYERS
    assert sent_bytes(cost, "all_gather", "expt_tp") == 2 * own
    assert sent_bytes(cost, "reduce_scatter", "expt_tp") == 2 * 2 * own


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [{}, {"model.activation": "gelu"}], ids=["silu", "gelu"])
@pytest.mark.parametrize("layout", [ON_TWO, SHARDED], ids=["ep", "ep and expert tp"])
def test_saved_tensors_are_those_of_the_page(
    gloo_pool: GlooPool, layout: dict[str, Any], config: dict[str, Any]
) -> None:
    """Beside the tokens, per row: the output of fc1, and the output of a rank's own row."""
    ranks = 2 if layout is ON_TWO else 4
    values = {**MOE, **layout, **config, **DROPS, FACTOR: 1.0, "train.global_batch_size": 2}
    runs = [((), values), ((NAME,), values)]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, ranks, runs)]
    plain, plugin = (expected_bytes(planned(config, names, ranks)[1][0]) for names, config in runs)
    assert sum(measured) == ranks * (plugin - plain)


def test_a_checkpoint_resumes_with_it_and_without(gloo_pool: GlooPool, tmp_path: Path) -> None:
    def weights(folder: str, steps: int, plugins: tuple[str, ...]) -> dict[str, torch.Tensor]:
        trial = Trial(
            plugins=plugins,
            config={**MOE, **ON_TWO, **DROPS},
            steps=steps,
            counted=False,
            checkpoints=str(tmp_path / folder),
        )
        return full_tensors(gloo_pool.run(run_trial, 2, trial)).tensors

    straight = weights("straight", 4, ())
    for folder, first, second in (("with", (NAME,), ()), ("without", (), (NAME,))):
        weights(folder, 2, first)
        resumed = weights(folder, 4, second)
        assert [*tensor_differences(resumed, straight, TRAINED_TOLERANCE)] == []


WORDS: Final = (
    "model.family=mixtral",
    "model.num_moe_experts=4",
    "model.moe_router_topk=2",
    "train.global_batch_size=2",
)
PADDED: Final = (f"{FACTOR}=1.0", f"{PAD}=true")


def test_it_owns_experts_and_their_dispatch_and_needs_expert_parallelism() -> None:
    assert claims_of(MoeBmmFused) == (Claim.EXPERTS, Claim.TOKEN_DISPATCHER)
    assert {*planned_with(NAME, *WORDS, *PADDED, ranks=2).plan.idle} == {NAME}
    assert {*planned_with(NAME, *WORDS, *PADDED, f"{EP}=2", ranks=2).plan.idle} == set()


def test_a_config_without_padded_experts_is_refused_with_all_that_to_set() -> None:
    gather = "model.moe_token_dispatcher_type=allgather"
    with pytest.raises(AscendRunError) as refused:
        planned_with(NAME, *WORDS, gather, f"{EP}=2", ranks=2)
    message = "\n".join(refused.value.problems)
    for setting in ("model.moe_token_dispatcher_type=alltoall", f"set {FACTOR}", f"set {PAD}=true"):
        assert setting in message
    planned_with(NAME, *WORDS, *PADDED, f"{EP}=2", ranks=2)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(name, reason, id=name, marks=pytest.mark.needs_plugins(name))
        for name, reason in (
            ("gmm", "both claim 'experts'"),
            ("moe-alltoall", "both claim 'token-dispatcher'"),
            ("moe-allgather", "both claim 'token-dispatcher'"),
            ("hot-experts", "so none is busier"),
            ("moe-zero-memory", "set model.recompute_modules=moe instead"),
            ("moe-adaptive-recompute", "set model.recompute_modules=moe instead"),
        )
    ],
)
def test_what_it_cannot_run_with_is_named_with_the_reason(other: str, reason: str) -> None:
    with pytest.raises(AscendRunError) as refused:
        planned_with(f"{NAME},{other}", *WORDS, *PADDED, f"{EP}=2", ranks=2)
    assert any(reason in problem for problem in refused.value.problems)
