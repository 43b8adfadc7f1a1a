"""Dropout masks over ranks, layers and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from ascend_run.ops.experts.capacity import expert_capacity
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.capture.mask_record import ATTENTION, DropoutMask
from ascend_run.tools.verify.capture.record import Record
from ascend_run.tools.verify.compare.dropout_masks import compare_masks
from ascend_run.tools.verify.compare.verdict import Check, Fault
from ascend_run.tools.verify.dropout import probabilities
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from tests.tools.verify import faults

ATTENTION_OF_0 = "decoder.layers.0.self_attention.core_attention"
ULYSSES = Question(enable=("ulysses",), layout={"cp": 2})
TP = Question(layout={"tp": 2})


def compared(
    pool: GlooPool, question: Question, fault: Callable[[], Any] | None
) -> tuple[Check, Fault | None]:
    side = sides_of(question).masks
    assert side is not None
    return compare_masks(PoolRanks(pool)(side, fault), probabilities(side))


@pytest.mark.exhaustive(by=lambda question: [bool(question.layout)])
@pytest.mark.parametrize(
    ("question", "fault", "module", "why"),
    [
        (TP, faults.drop_alike_on_tensor_parallel_ranks, ATTENTION_OF_0, "has the mask of rank 0"),
        (
            Question(layout={}),
            faults.drop_alike_in_all_micro_batches,
            "decoder.layers.1.self_attention.core_attention",
            f"has the mask of rank 0, {ATTENTION_OF_0}",
        ),
        (Question(layout={}), faults.drop_what_should_be_kept, ATTENTION_OF_0, "expected 0.8"),
        (
            Question(layout={"tp": 2, "sp": 1}),
            faults.drop_alike_in_shards_of_the_sequence,
            "embedding.embedding_dropout",
            "drop shards and must differ",
        ),
        (
            TP,
            faults.drop_differently_in_replicas,
            "decoder.layers.0",
            "drop replicas and must be the same",
        ),
        pytest.param(
            ULYSSES,
            faults.drop_alike_on_context_parallel_ranks,
            ATTENTION_OF_0,
            "rank 1, ",
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        (Question(layout={}), faults.recompute_with_another_mask, "", "recomputes with another"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_dropout_masks_are_found(
    gloo_pool: GlooPool,
    question: Question,
    fault: Callable[[], Any],
    module: str,
    why: str,
) -> None:
    check, found = compared(gloo_pool, question, fault)
    assert not check.passed
    assert found is not None
    assert found.module == (module or "random streams")
    assert why in found.why


@pytest.mark.needs_plugins("ring-attention")
def test_blocks_of_a_ring_have_masks_of_their_own(gloo_pool: GlooPool) -> None:
    question = Question(enable=("ring-attention",), layout={"cp": 2})
    assert compared(gloo_pool, question, None)[1] is None


@pytest.mark.needs_plugins("recompute-in-bubble")
def test_masks_drawn_again_before_the_backward_are_those_of_the_forward(
    gloo_pool: GlooPool,
) -> None:
    options = {"plugins.recompute-in-bubble.num_forwards": 2}
    layout = {"pp": 2, "vpp": 2}
    question = Question(enable=("recompute-in-bubble",), layout=layout, config=options)
    side = sides_of(question).masks
    assert side is not None
    records = PoolRanks(gloo_pool)(side, None)
    assert any(mask.is_redrawn for record in records for mask in record.masks)
    assert compare_masks(records, probabilities(side))[1] is None


def test_a_model_with_masks_of_its_own_keeps_its_probabilities() -> None:
    side = sides_of(Question(layout={}, config={"model.hidden_dropout": 0.05})).masks
    assert side is not None
    assert probabilities(side) == {"hidden": 0.05, ATTENTION: 0.0}


def test_routers_are_compared_without_what_depends_on_the_layout() -> None:
    noise: dict[str, Any] = {
        "moe_input_jitter_eps": 0.1,
        "moe_router_force_load_balancing": True,
        "moe_sparsemixer_sampling": True,
        "moe_expert_capacity_factor": 1.5,
    }
    values = {f"model.{name}": value for name, value in noise.items()}
    del values["model.moe_router_force_load_balancing"]
    values["model.moe_sparsemixer_eps"] = 0.1
    sides = sides_of(Question(model="moe", layout={"dp": 2}, config=values))
    assert "compared with routers that go by the logits alone" in "\n".join(sides.notes)
    for side in (sides.candidate, sides.plain):
        model = side.prepare().config.model
        assert not any(model[name] for name in noise)
    plain = sides_of(Question(model="moe", layout={"dp": 2}))
    assert "routers" not in "\n".join(plain.notes)


def test_padded_experts_drop_no_token_of_any_rank() -> None:
    padded = {
        "model.moe_expert_capacity_factor": 0.5,
        "model.moe_pad_expert_input_to_capacity": True,
    }
    sides = sides_of(Question(model="moe", layout={"dp": 2}, config=padded))
    for side in (sides.candidate, sides.plain):
        model = side.prepare().config.model
        assert model.moe_pad_expert_input_to_capacity
        for tokens in (1, 7, 4096):
            sizes = (tokens, model.num_moe_experts, model.moe_router_topk)
            assert expert_capacity(*sizes, model.moe_expert_capacity_factor) == tokens


def test_experts_drop_tokens_where_all_runs_have_one_rank() -> None:
    capacity = {"model.moe_expert_capacity_factor": 1.5}
    sides = sides_of(Question(model="moe", layout={}, config=capacity))
    assert "routers" not in "\n".join(sides.notes)
    for side in (sides.candidate, sides.plain):
        assert side.prepare().config.model.moe_expert_capacity_factor == 1.5


def made_up(*digests: str, **changed: Any) -> list[Record]:
    """One rank with a mask of attention for each digest."""
    mask = DropoutMask(
        module="a",
        kind=ATTENTION,
        call=0,
        micro_batch=0,
        is_redrawn=False,
        keep=0.5,
        kept=500,
        size=1000,
        digest="",
    )
    masks = [attrs.evolve(mask, digest=digest, **changed) for digest in digests]
    return [Record(rank=0, coordinates={"tp": 0, "pp": 0, "cp": 0, "dp": 0}, sizes={}, masks=masks)]


@pytest.mark.parametrize(
    ("records", "good"),
    [
        (made_up("1", "2"), True),
        (made_up("1", "1"), False),
        (made_up("1", "1", size=30, kept=15), True),
        (made_up("1", kept=420), True),
        (made_up("1", kept=370), False),
        (made_up(), False),
    ],
    ids=["independent", "equal", "short", "5 deviations", "8 deviations", "none"],
)
def test_chance_is_told_from_a_wrong_mask(records: list[Record], good: bool) -> None:
    assert compare_masks(records, {ATTENTION: 0.5})[0].passed is good


def test_no_recorded_mask_leaves_nothing_to_compare() -> None:
    """A kernel of another platform may draw the masks of attention itself, unseen."""
    assert compare_masks(made_up(), {})[0].state == "-"
    assert compare_masks(made_up("1"), {})[0].state == "ok"
