"""Plugins' changes, applied to the plain model's numbers."""

from __future__ import annotations

import attrs
import pytest

from ascend_run.plugin_api import (
    Communication,
    CostChange,
    ParameterCost,
    Phase,
    SavedChange,
    SavedTensor,
    Storage,
    WorkingMemory,
)
from ascend_run.tools.plan.cost_model.collectives import merged
from ascend_run.tools.plan.cost_model.ledger import Ledger, Saved


@pytest.fixture
def ledger() -> Ledger:
    forward = Communication(operation="all_reduce", group="tp", calls=1, sent_bytes=8, why="mlp")
    return Ledger(
        saved={
            layer: [
                Saved(part="self_attention", name="q", nbytes=100),
                Saved(part="self_attention", name="lse", nbytes=4),
                Saved(part="mlp", name="input", nbytes=50),
                Saved(part="mlp", name="hidden", nbytes=200),
            ]
            for layer in (3, 4)
        },
        steps={3: (), 4: ()},
        parameters=[ParameterCost(part="mlp", name="linear_fc1", numel=10, layer=3)],
        communication=[],
        flops=1000.0,
        part_flops={3: {"mlp": 7.0}, 4: {"mlp": 7.0}},
        part_communication={3: {"mlp": [forward]}, 4: {"mlp": [forward]}},
        num_microbatches=2,
    )


def held(ledger: Ledger, layer: int, storage: Storage) -> dict[str, float]:
    return {t.key: t.nbytes for t in ledger.saved[layer] if t.storage is storage}


def test_tensors_go_to_the_host_where_they_are_large_enough(ledger: Ledger) -> None:
    to_host = SavedChange(tensors=("self_attention.*",), storage=Storage.HOST, at_least=10, ahead=1)
    ledger.apply(CostChange(saved=(to_host,)))
    assert held(ledger, 3, Storage.HOST) == {"self_attention.q": 100}
    assert "self_attention.lse" in held(ledger, 3, Storage.DEVICE)
    assert [t.ahead for t in ledger.saved[3] if t.storage is Storage.HOST] == [1]


def test_tensors_grow_vanish_or_are_added_in_the_named_layers(
    ledger: Ledger,
) -> None:
    ledger.apply(
        CostChange(
            saved=(
                SavedChange(tensors=("*.q",), factor=2, layers=(3,)),
                SavedChange(tensors=("mlp.hidden",), storage=Storage.NONE, layers=(4,)),
            ),
            saved_added=(SavedTensor(part="mlp", name="mask", nbytes=1),),
            saved_added_layers=(4,),
        )
    )
    assert held(ledger, 3, Storage.DEVICE)["self_attention.q"] == 200
    assert held(ledger, 4, Storage.DEVICE)["self_attention.q"] == 100
    assert [t.name for t in ledger.saved[4]] == ["q", "lse", "input", "mask"]


def test_a_recomputed_module_saves_its_input_and_adds_its_forward(
    ledger: Ledger,
) -> None:
    ledger.recompute(("mlp",), [(3,)])
    assert held(ledger, 3, Storage.DEVICE).keys() & {"mlp.input", "mlp.hidden"} == {"mlp.input"}
    assert "mlp.hidden" in held(ledger, 4, Storage.DEVICE)
    assert ledger.flops == 1000 + 2 * 7
    assert [m.sent_bytes for m in ledger.sent()] == [8]


def test_discarded_tensors_are_recomputed_without_the_rest_of_their_part(ledger: Ledger) -> None:
    ledger.discard(("mlp.hidden",), 3)
    ledger.apply(CostChange(saved_added=(SavedTensor(part="mlp", name="mask", nbytes=1),)))
    mlp = {t.name: (t.storage, t.again) for t in ledger.saved[3] if t.part == "mlp"}
    assert mlp["hidden"] == (Storage.NONE, 3)
    assert mlp["input"] == mlp["mask"] == (Storage.DEVICE, None)
    assert "mlp.hidden" in held(ledger, 4, Storage.DEVICE)
    assert ledger.flops == 1000.0


def test_what_is_recomputed_is_not_offloaded(ledger: Ledger) -> None:
    ledger.recompute(("*",), [(3,)])
    ledger.apply(CostChange(saved=(SavedChange(tensors=("*",), storage=Storage.HOST),)))
    assert held(ledger, 3, Storage.HOST) == {}
    assert held(ledger, 3, Storage.DEVICE) == {"self_attention.q": 100}
    assert len(held(ledger, 4, Storage.HOST)) == 4


def test_additions_to_a_recomputed_part_are_not_saved(ledger: Ledger) -> None:
    ledger.recompute(("mlp",), [(3, 4)])
    ledger.apply(CostChange(saved_added=(SavedTensor(part="mlp", name="steps", nbytes=9),)))
    added = [t for layer in (3, 4) for t in ledger.saved[layer] if t.name == "steps"]
    assert [(t.storage, t.again) for t in added] == [(Storage.NONE, 4)] * 2


def test_temporary_memory_replaces_that_of_the_plain_model_in_each_step(
    ledger: Ledger,
) -> None:
    from ascend_run.tools.plan.cost_model.backward import Step

    own = WorkingMemory(part="experts", name="all", nbytes=30, phase=Phase.BACKWARD)
    of_a_step = WorkingMemory(part="mlp.fc1", name="wide", nbytes=7, phase=Phase.BACKWARD)
    ledger.apply(CostChange(working=(own, of_a_step), working_removed=("experts.loop",)))
    assert ledger.working_bytes(Step("mlp", "fc1", 5), Phase.BACKWARD) == 12
    assert ledger.working_bytes(Step("experts", "loop", 500), Phase.BACKWARD) == 30
    assert ledger.working_bytes(Step("experts", "rest", 5), Phase.BACKWARD) == 35
    assert ledger.working_bytes(Step("mlp", "loop", 500), Phase.BACKWARD) == 500


def test_frozen_parameters_are_not_trained_and_added_ones_are(ledger: Ledger) -> None:
    added = ParameterCost(part="mlp", name="adapter", numel=2, layer=3)
    ledger.apply(CostChange(frozen=("*",), parameters=(added,)))
    assert [(p.name, p.trained) for p in ledger.parameters] == [
        ("linear_fc1", False),
        ("adapter", True),
    ]


def test_replaced_collectives_are_doubled_by_recomputation(ledger: Ledger) -> None:
    """Factors of what is there in the end, whether it came before the change or after."""

    def sent(operation: str, calls: float, nbytes: float, why: str = "mlp") -> Communication:
        return Communication(
            operation=operation, group="tp", calls=calls, sent_bytes=nbytes, why=why
        )

    def instead(operation: str, calls: float, nbytes: float, why: str) -> Communication:
        return attrs.evolve(sent(operation, calls, nbytes, why), replaces="all_reduce")

    ledger.communication = [sent("all_reduce", 2, 16), sent("all_gather", 1, 4)]
    ledger.recompute(("mlp",), [(3,), (4,)])
    ledger.apply(
        CostChange(
            communication=(instead("send", 3, 0.75, "ml*"), instead("all_gather", 1, 0.25, "mlp")),
        )
    )
    ledger.communication.append(sent("all_reduce", 1, 8, why="loss"))
    calls = [(m.operation, m.calls, m.sent_bytes, m.why) for m in ledger.sent()]
    again = [("send", 3, 6, "mlp"), ("all_gather", 1, 2, "mlp")]
    assert calls == [
        ("send", 6, 12, "mlp"),
        ("all_gather", 2, 4, "mlp"),
        ("all_gather", 1, 4, "mlp"),
        ("all_reduce", 1, 8, "loss"),
        *again,
        *again,
    ]
    ledger.apply(CostChange(communication=(instead("all_reduce", 0, 0, "loss"),)))
    assert "loss" not in {m.why for m in ledger.sent()}


def test_what_a_recomputation_repeats_is_replaced_alone(ledger: Ledger) -> None:
    plain = Communication(operation="all_reduce", group="tp", calls=2, sent_bytes=16, why="mlp")
    ledger.communication = [plain]
    ledger.recompute(("mlp",), [(3,)])
    left_out = attrs.evolve(
        plain, calls=0, sent_bytes=0, why="mlp, again", replaces=plain.operation
    )
    ledger.apply(CostChange(communication=(left_out,)))
    assert ledger.sent() == [plain]


def test_what_a_recomputation_needs_is_saved_in_layers_recomputed_whole(ledger: Ledger) -> None:
    ledger.recompute(("*",), [(3,)])
    ledger.recompute(("mlp",), [(4,)])
    needed = SavedTensor(part="recomputation", name="between", nbytes=7)
    ledger.apply(CostChange(saved_added=(needed,)))
    assert held(ledger, 3, Storage.DEVICE)["recomputation.between"] == 7
    assert "recomputation.between" not in held(ledger, 4, Storage.DEVICE)


def test_the_largest_call_is_known_where_sizes_differ(ledger: Ledger) -> None:
    def sent(calls: float, nbytes: float, largest: float = 0.0) -> Communication:
        return Communication(
            operation="all_to_all", group="cp", calls=calls, sent_bytes=nbytes,
            largest_bytes=largest, why="heads",
        )  # fmt: skip

    equal, smaller, uneven = sent(2, 80), sent(1, 20), sent(2, 50, largest=30)
    for parts, largest in (
        ((equal, equal), 40),
        ((equal, smaller), 40),
        ((smaller, uneven), 30),
        ((smaller, uneven, equal), 40),
    ):
        (found,) = merged(parts)
        assert (found.largest_bytes or found.sent_bytes / found.calls) == largest
        assert found.sent_bytes == sum(part.sent_bytes for part in parts)
    ledger.communication = [uneven]
    half = attrs.evolve(sent(4, 2.0), replaces="all_to_all")
    ledger.apply(CostChange(communication=(half,)))
    assert [m.largest_bytes for m in ledger.sent()] == [15]


def test_a_plugins_collectives_in_a_recomputed_forward_are_repeated(ledger: Ledger) -> None:
    """For the share of the layers with the part that are recomputed; those of backward are not."""
    ledger.recompute(("mlp",), [(3,)])
    ledger.again = {}  # the plain model's
    sent = [
        Communication(operation="broadcast", group="ep", calls=4, sent_bytes=40, why=why)
        for why in ("mlp, forward: copies", "mlp, backward: copies", "self_attention, forward")
    ]
    ledger.apply(CostChange(communication=tuple(sent)))
    found = {m.why: (m.calls, m.sent_bytes) for m in merged(ledger.sent())}
    assert found == {sent[0].why: (6, 60), sent[1].why: (4, 40), sent[2].why: (4, 40)}


def test_what_a_plugin_added_and_another_drops_exists_in_its_backward(ledger: Ledger) -> None:
    dropped = SavedChange(tensors=("mlp.copies", "mlp.hidden"), storage=Storage.NONE, layers=(3,))
    ledger.apply(CostChange(saved_added=(SavedTensor(part="mlp", name="copies", nbytes=9),)))
    ledger.apply(CostChange(saved=(dropped,)))
    again = {t.name: t.again for t in ledger.saved[3] if t.storage is Storage.NONE}
    assert again == {"copies": 3}
    assert held(ledger, 4, Storage.DEVICE)["mlp.copies"] == 9
