"""What ``plan`` expects of a choice, against the peak of a run by all storages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest
from structlog.testing import capture_logs

from ascend_run.plugin_api import PipelineStage
from ascend_run.plugins.memory.adaptive_recompute import cost
from ascend_run.plugins.memory.adaptive_recompute.expected import kept_beside_input
from ascend_run.plugins.memory.adaptive_recompute.treatment import Treatment, treatments
from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import TOLERANCE, plan_of

NAME: Final = "adaptive-recompute"
MIB: Final = 1 << 20
BOUND: Final = 0.1
"""Of a peak, where the run chooses by its times and the plan by FLOPs and bytes."""
PIPELINE: Final = {"parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 16}
CASES: Final = (
    Case(name="one rank", values={"train.global_batch_size": 8}),
    Case(name="pp 2", ranks=2, values=PIPELINE),
    Case(
        name="pp 2, vpp 2",
        ranks=2,
        values={**PIPELINE, "parallel.virtual_pipeline_model_parallel_size": 2},
    ),
)
HELD_OUT: Final = (
    Case(
        name="more layers, in fp32",
        values={
            "model.hidden_size": 48,
            "model.ffn_hidden_size": 128,
            "model.num_layers": 8,
            "train.precision": "fp32",
        },
    ),
    Case(
        name="narrower, with longer sequences",
        values={
            "model.hidden_size": 32,
            "model.ffn_hidden_size": 96,
            "model.num_layers": 6,
            "data.seq_length": 256,
        },
    ),
)
"""Models whose times no constant of the plan comes from."""


def with_budget(case: Case, nbytes: float) -> Case:
    own = {"activation_mb": nbytes / MIB, "profiled_steps": 1}
    values = {**case.values, **{f"plugins.{NAME}.{key}": value for key, value in own.items()}}
    return attrs.evolve(case, plugins=(NAME,), values=values)


def peak_and_choice(values: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    """Return the peak of a step with a choice, and what becomes of each layer. A rank's job."""
    from benchmarks.memory_run import two_steps

    with capture_logs() as events:
        measured = two_steps(values, (NAME,))
    (layers,) = (e["layers"] for e in events if e["event"] == f"{NAME}.chosen")
    return measured.peak, layers


def treatment_of(words: str) -> Treatment:
    return next(how for how in treatments(swaps=False) if how.words == words)


@pytest.mark.exhaustive(by=lambda case: ())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_choice_is_planned_within_five_percent(
    gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Whatever the choice, which depends on times: the plan is of the parts that it keeps."""
    found = gloo_pool.run(peak_and_choice, case.ranks, with_budget(case, 2 * MIB).config)
    chosen = {int(n): treatment_of(words) for _, layers in found for n, words in layers.items()}
    assert {*chosen.values()} != {Treatment()}

    def kept(budget: int, config: object, layout: object, rank: PipelineStage) -> Any:
        return {
            layer: tuple(t.key for t in kept_beside_input(saved, chosen[layer]))
            for layer, saved in rank.saved.items()
        }

    monkeypatch.setattr(cost, "kept_tensors", kept)
    prepared, costs = plan_of(with_budget(case, 2 * MIB))
    for rank, (peak, _) in enumerate(found):
        expected = costs[prepared.layout.coordinate("pp", rank)].memory.peak
        assert expected == pytest.approx(peak, rel=TOLERANCE)


@pytest.mark.parametrize("case", HELD_OUT, ids=lambda case: case.name)
def test_a_choice_of_another_model_is_planned_within_ten_percent(
    gloo_pool: GlooPool, case: Case
) -> None:
    """By the plan's own choice: it counts other parts than the run keeps, of about the bytes."""
    _, (without,) = plan_of(case)
    saved = (tensor for layer in without.rank.layers for tensor in without.rank.saved[layer])
    within = with_budget(case, 0.5 * sum(tensor.nbytes for tensor in saved))
    ((peak, layers),) = gloo_pool.run(peak_and_choice, 1, within.config)
    _, (cost,) = plan_of(within)
    assert {*layers.values()} != {"nothing"}
    assert cost.memory.peak == pytest.approx(peak, rel=BOUND)
    assert without.memory.peak > (1 + BOUND) * peak
