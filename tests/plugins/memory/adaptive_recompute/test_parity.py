"""Runs with adaptive-recompute against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.runtime import RankOutcome

LAYERS, MICRO_BATCHES, EXPERTS = 2, 2, 4  # of a step in trials with steps
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}


def budget(mib: float) -> dict[str, object]:
    """As options, with one measured step."""
    name = "plugins.adaptive-recompute"
    return {f"{name}.activation_mb": mib, f"{name}.profiled_steps": 1}


def trained(parity: Parity, **case: Any) -> list[RankOutcome]:
    """Compare with the run without the plugin; return the third step of the run with it, whose
    choice is the one after the measured step."""
    parity("adaptive-recompute", **case)
    return parity.outcomes(Case(plugins=("adaptive-recompute",), **case), steps=3)


def more_operations(parity: Parity, found: Sequence[RankOutcome], **case: Any) -> list[int]:
    """How many more operations each rank executes in that step than without the plugin."""
    plain = parity.outcomes(Case(plugins=(), **case), steps=3)
    pairs = zip(found, plain, strict=True)
    return [sum(a.operations.values()) - sum(b.operations.values()) for a, b in pairs]


@pytest.mark.parametrize(("model", "again"), [("dense", 1), ("moe", EXPERTS + 1)])
def test_whole_layers_run_again_where_the_budget_is_too_small(
    parity: Parity, model: str, again: int
) -> None:
    config = {**DROPOUT, **(SHARED if model == "moe" else {})}
    (outcome,) = trained(parity, model=model, config=config, options=budget(1e-4))
    assert outcome.operations["silu"] == 2 * again * MICRO_BATCHES * LAYERS


def test_nothing_runs_again_where_all_is_within_the_budget(parity: Parity) -> None:
    (outcome,) = trained(parity, options=budget(100.0))
    assert outcome.operations["silu"] == MICRO_BATCHES * LAYERS
    assert more_operations(parity, [outcome]) == [0]


@pytest.mark.exhaustive(by=lambda model: ())
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_some_parts_run_again_and_no_bit_changes(parity: Parity, model: str) -> None:
    (outcome,) = trained(parity, model=model, config=DROPOUT, options=budget(0.04))
    (more,) = more_operations(parity, [outcome], model=model, config=DROPOUT)
    (whole,) = trained(parity, model=model, config=DROPOUT, options=budget(1e-4))
    (most,) = more_operations(parity, [whole], model=model, config=DROPOUT)
    assert 0 < more < most


@pytest.mark.exhaustive(by=lambda layout: {*layout} & {"vpp"})
@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}], ids=str
)
def test_no_bit_changes_on_several_ranks(parity: Parity, layout: dict[str, int]) -> None:
    """The campaign ``together`` has every layout."""
    config = {"model.num_layers": 4} if "vpp" in layout else {}
    case: dict[str, Any] = {"layout": layout, "model": "moe" if "ep" in layout else "dense"}
    found = trained(parity, **case, config=config, options=budget(0.02))
    assert all(more > 0 for more in more_operations(parity, found, **case, config=config))


@pytest.mark.exhaustive(by=lambda layout: ["ep"] if "ep" in layout else [])
@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}], ids=str
)
def test_swapped_parts_do_not_run_again(
    parity: Parity, tmp_path: Path, layout: dict[str, int]
) -> None:
    """They keep nothing, which is less than the input of a layer. A stage that receives its input
    holds it anyhow."""
    config = {"model.num_layers": 4} if "vpp" in layout else {}
    case: dict[str, Any] = {"layout": layout, "model": "moe" if "ep" in layout else "dense"}
    name = "plugins.adaptive-recompute"
    options = {**budget(1e-4), f"{name}.folder": str(tmp_path), f"{name}.min_bytes": 1}
    found = trained(parity, **case, config=config, options=options)
    plain = parity.outcomes(Case(plugins=(), **case, config=config), steps=3)
    (first, *_), (without, *_) = found, plain
    for name in ("silu", "mm", "addmm"):
        assert first.operations[name] == without.operations[name]
    assert first.operations["copy_"] > without.operations["copy_"]
