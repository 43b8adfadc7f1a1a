"""Full experts over tensor-parallel ranks, against one rank and against sharded experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import TRAINED_TOLERANCE, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import differences as tensor_differences
from ascend_run.testing.tensors import full_tensors
from tests.support.communication import OPERATIONS, differences
from tests.support.needed_plugins import case
from tests.support.small_runs import prepare, standing_model
from tests.support.tiny_options import planned_with

NAME = "moe-tp-extend-ep"
SIZE: Final = f"plugins.{NAME}.expert_parallel_size"
EP, EXPERT_TP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
TWO_GROUPS: Final = {SIZE: 2}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
BALANCED: Final = {"model.moe_aux_loss_coeff": 0.1, "model.moe_z_loss_coeff": 0.05}
WORDS = ("model.family=mixtral", "model.moe_router_topk=2", *(f"{k}={v}" for k, v in TP.items()))
TOKENS, WIDTH = 6, 32


@pytest.mark.exhaustive(by=lambda beside, layout: (*beside, *layout))
@pytest.mark.parametrize(
    ("beside", "layout", "config", "options"),
    [
        ((), {"tp": 2}, BALANCED, {}),
        ((), {"tp": 2, "dp": 2}, BALANCED, TWO_GROUPS),
        ((), {"tp": 2, "dp": 2}, {"model.moe_shared_expert_intermediate_size": 24}, {}),
        case(("gmm", "moe-alltoall"), {"tp": 2, "dp": 2}, BALANCED, TWO_GROUPS),
        case(
            ("moe-allgather",),
            {"tp": 2, "dp": 2},
            {"model.moe_token_dispatcher_type": "allgather"},
            TWO_GROUPS,
        ),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_one_rank(
    parity: Parity,
    beside: tuple[str, ...],
    layout: dict[str, int],
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Those of the router's losses too, which are of the tokens of all ranks."""
    outcomes = parity(
        NAME, beside=beside, model="moe", layout=layout, config=config, options=options
    )
    for outcome in outcomes:
        sends = any("alltoall" in name for name in outcome.collectives)
        assert sends is ("model.moe_token_dispatcher_type" not in config)


def experts_of_this_rank(plugins: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Dispatch this rank's own tokens; a job for the pool."""
    with standing_model({**MOE, **TP, **values}, enable=plugins) as model:
        moe = model.decoder.layers[0].mlp
        rows: list[int] = []
        moe.experts.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn((TOKENS, 1, WIDTH), dtype=torch.float64, generator=generator)
        moe(x)
        return {
            "experts": list(moe.local_expert_indices),
            "width": moe.experts.fc2.shape[-1],
            "rows": rows[0],
        }


def test_ranks_own_experts_of_their_own_and_no_token_is_computed_twice(
    gloo_pool: GlooPool,
) -> None:
    """The first expert is (ep_rank * tp + tp_rank) * experts_per_rank, as in MindSpeed."""
    values = {"model.num_moe_experts": 8}
    found = gloo_pool.run(experts_of_this_rank, 4, (NAME,), {**values, **TWO_GROUPS})
    for rank, seen in enumerate(found):
        ep_rank, tp_rank = divmod(rank, 2)
        first = (ep_rank * 2 + tp_rank) * 2
        assert seen["experts"] == [first, first + 1]
        assert seen["width"] == 48
    assert sum(seen["rows"] for seen in found) == 4 * TOKENS * MOE["model.moe_router_topk"]
    sharded = gloo_pool.run(experts_of_this_rank, 4, (), {**values, EP: 2, EXPERT_TP: 2})
    assert {seen["width"] for seen in sharded} == {24}
    assert sum(seen["rows"] for seen in sharded) == 2 * sum(seen["rows"] for seen in found)


LONGER: Final = {
    **MOE,
    **TP,
    "data.seq_length": 64,
    "model.num_moe_experts": 16,
    "model.moe_router_force_load_balancing": True,
}
"""So that what is counted is more than a few numbers, and that no rank pads its rows."""


def bytes_of_experts(gloo_pool: GlooPool, plugins: tuple[str, ...], values: Any) -> dict[str, int]:
    """Return the bytes that all ranks send in a step, by operation."""
    outcomes = gloo_pool.run(run_trial, 4, Trial(plugins=plugins, config=values, steps=1))
    total: dict[str, int] = {}
    for outcome in outcomes:
        for call in outcome.collective_calls:
            name = OPERATIONS.get(call.operation, call.operation)
            total[name] = total.get(name, 0) + call.nbytes
    return total


def test_no_token_is_gathered_over_tensor_parallel_ranks(gloo_pool: GlooPool) -> None:
    """Per rank, layer and micro-batch, of T tokens with K experts each: what is sent to the experts
    and back is K T H, in both directions, however many ranks share them; and an expert's shards
    gather K T (H + 1) and scatter 2 K T H more in forward, and the reverse in backward."""
    mine = bytes_of_experts(gloo_pool, (NAME,), {**LONGER, **TWO_GROUPS})
    sharded = bytes_of_experts(gloo_pool, (), {**LONGER, EP: 2, EXPERT_TP: 2})
    ranks, layers, item, tp = 4, 2, 4, 2
    micro_batches = MOE["train.global_batch_size"] // 2
    rows = ranks * layers * micro_batches * 64 // tp * MOE["model.moe_router_topk"]
    sent = item * rows * (4 * WIDTH + 2)  # tokens and outputs; weights, forward and backward
    assert mine["all_to_all"] == sharded["all_to_all"] == sent
    forward = item * rows * (WIDTH + 1)
    assert sharded["all_gather"] - mine["all_gather"] == forward + item * rows * WIDTH
    backward = tp * item * rows * (WIDTH + 1)
    assert sharded["reduce_scatter"] - mine["reduce_scatter"] == (
        tp * item * rows * WIDTH + backward
    )


@pytest.mark.exhaustive(by=lambda beside: beside)
@pytest.mark.parametrize(
    ("beside", "config"),
    [
        ((), {**TWO_GROUPS}),
        ((), {"parallel.tensor_model_parallel_size": 4}),
        case(("moe-alltoall",), {**TWO_GROUPS}),
        case(("moe-allgather",), {**TWO_GROUPS, "model.moe_token_dispatcher_type": "allgather"}),
    ],
    ids=str,
)
def test_communication_matches_the_cost_model(
    gloo_pool: GlooPool, beside: tuple[str, ...], config: dict[str, Any]
) -> None:
    assert differences(gloo_pool, {**LONGER, **config}, (NAME, *beside)) == []


def test_a_checkpoint_resumes_with_it_and_without(gloo_pool: GlooPool, tmp_path: Path) -> None:
    def weights(folder: str, steps: int, plugins: tuple[str, ...]) -> dict[str, torch.Tensor]:
        trial = Trial(
            plugins=plugins,
            config={**MOE, **(TP if plugins else {})},
            steps=steps,
            counted=False,
            checkpoints=str(tmp_path / folder),
        )
        return full_tensors(gloo_pool.run(run_trial, 2 if plugins else 1, trial)).tensors

    straight = weights("straight", 4, ())
    for folder, first, second in (("with", (NAME,), ()), ("without", (), (NAME,))):
        weights(folder, 2, first)
        resumed = weights(folder, 4, second)
        assert [*tensor_differences(resumed, straight, TRAINED_TOLERANCE)] == []


def test_the_plan_has_the_joint_size_and_the_plugin_that_sets_it() -> None:
    words = (*WORDS, "model.num_moe_experts=8", "train.global_batch_size=2")
    prepared = planned_with(NAME, *words, f"{SIZE}=2", ranks=4)
    assert (prepared.layout.ep, prepared.layout.expt_tp) == (4, 1)
    assert prepared.plan.origins[EP] == f"plugin '{NAME}'"
    assert prepared.plan.idle == {}
    named = planned_with(NAME, *words, f"{EP}=2", ranks=4)
    assert named.plan.origins[EP] == "command line"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((f"{EP}=4",), f"so {EP} is 2, not 4"),
        ((f"{EXPERT_TP}=2",), f"so {EXPERT_TP} is 1, not 2"),
        ((f"{SIZE}=3",), f"model.num_moe_experts=8 cannot be split over {EP}=6"),
        (("parallel.sequence_parallel=false",), "need parallel.sequence_parallel=true"),
    ],
    ids=["expert parallelism", "expert tensor parallelism", "number of experts", "sequence"],
)
def test_a_layout_that_it_does_not_make_is_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(AscendRunError) as refused:
        planned_with(NAME, *WORDS, "model.num_moe_experts=8", *words, ranks=12)
    assert any(problem in found for found in refused.value.problems)


def test_it_is_idle_without_experts_and_on_one_rank() -> None:
    assert {*planned_with(NAME, *(f"{k}={v}" for k, v in TP.items()), ranks=2).plan.idle} == {NAME}
    alone = prepare(MOE, (NAME,))
    assert {*alone.plan.idle} == {NAME}


@pytest.mark.parametrize("size", [EP, EXPERT_TP])
def test_sizes_besides_one_tensor_parallel_rank_are_its_own(size: str) -> None:
    """Without its option it would change nothing, in a run that distributes experts otherwise."""
    with pytest.raises(AscendRunError, match=f"so {size} is 1, not 2"):
        prepare({**MOE, size: 2}, (NAME,), world_size=2)
    spread = prepare({**MOE, SIZE: 2}, (NAME,), world_size=2)
    assert spread.config.parallel == prepare({**MOE, EP: 2}, world_size=2).config.parallel
    assert {*spread.plan.idle} == set()
