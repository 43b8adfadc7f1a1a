"""What layers keep, measured by the plugin and without it; what ranks decide from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import nn

from ascend_run.plugins.memory.adaptive_recompute.decision import decide
from ascend_run.plugins.memory.adaptive_recompute.layer import NEVER, Layer
from ascend_run.plugins.memory.adaptive_recompute.recorder import Mode
from ascend_run.plugins.memory.adaptive_recompute.treatment import Treatment, treatments
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.saved_tensors import saved_bytes
from tests.support.small_runs import standing_rank, training

NAME: Final = "adaptive-recompute"
BUDGET: Final = f"plugins.{NAME}.activation_mb"
WHOLE: Final = {"train.global_batch_size": 1, f"plugins.{NAME}.profiled_steps": 1}
HALF: Final = {**WHOLE, "train.precision": "bf16"}
MIB: Final = 1 << 20
CHOICES: Final = treatments(swaps=False)
INTERLEAVED: Final = {
    "model.num_layers": 4,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.virtual_pipeline_model_parallel_size": 2,
    "train.global_batch_size": 4,
}
TP: Final = {"parallel.tensor_model_parallel_size": 2}


def again(*parts: str) -> Treatment:
    return Treatment(recomputed=parts)


def forced(values: Mapping[str, Any]) -> dict[Treatment, tuple[int, int]]:
    """Return for each choice that layers have the bytes that were predicted from the first step,
    and those measured in a step in which all layers recompute it. A rank's job."""
    found = {}
    with training({**values, BUDGET: 100.0}, (NAME,)) as run:
        run.step_with_events()
        (plugin,) = (p for p in run.hooks.plugins if p.manifest.name == NAME)
        recorder: Any = plugin._tuner.recorder  # type: ignore[attr-defined]
        for choice in CHOICES:
            predicted = sum(layer.nbytes[choice] for layer in recorder.layers)
            if predicted >= NEVER:
                continue
            recorder.begin(Mode.LAYERS)
            for layer in recorder.layers:
                layer.chosen = choice
            run.step()
            found[choice] = predicted, recorder.peak
    return found


def readings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train until the choice has been measured; return what the plugin found. A rank's job."""
    with training(values, (NAME,)) as run:
        for _ in range(3):
            run.step_with_events()
        (plugin,) = (p for p in run.hooks.plugins if p.manifest.name == NAME)
        tuner: Any = plugin._tuner  # type: ignore[attr-defined]
        decision = tuner.decision
        return {
            "kept": tuner.kept,
            "expected": decision.expected,
            "least": decision.least,
            "chosen": decision.by_layer(),
        }


@pytest.mark.parametrize(
    "values",
    [
        {**DENSE, **WHOLE},
        {**DENSE, **HALF, "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
        {**DENSE, **WHOLE, "model.normalization": "LayerNorm", "model.add_bias_linear": True},
    ],
    ids=["plain", "bf16, dropout", "layer norms, biases"],
)
def test_each_choice_keeps_what_was_predicted(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    (found,) = gloo_pool.run(forced, 1, values)
    assert list(found) == list(CHOICES)
    assert {choice: pair for choice, pair in found.items() if pair[0] != pair[1]} == {}
    order = (again(""), again("self_attention", "mlp"), again("mlp"), again())
    kept = [found[treatment][0] for treatment in order]
    assert kept == sorted({*kept})


def test_norms_after_their_sublayers_are_not_recomputed(gloo_pool: GlooPool) -> None:
    """Nothing is before the attention or the MLP then."""
    (found,) = gloo_pool.run(forced, 1, {**DENSE, **WHOLE, "model.norm_placement": "post"})
    parts = ("self_attention", "mlp")
    assert {*found} == {again(), *map(again, parts), again(*parts), again("")}
    assert {choice: pair for choice, pair in found.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_what_is_kept_is_within_the_budget(
    gloo_pool: GlooPool, model: Mapping[str, Any], share: float
) -> None:
    """Measured in another run without the plugin's hooks, by storages; as other times are measured
    there, the choice may be another one."""
    (plain,) = gloo_pool.run(saved_bytes, 1, [((), {**model, "train.global_batch_size": 1})])[0]
    budget = share * plain
    chosen = {**model, **WHOLE, BUDGET: budget / MIB}
    (reading,) = gloo_pool.run(readings, 1, chosen)
    (kept,) = gloo_pool.run(saved_bytes, 1, [((NAME,), chosen)], 3)[0]
    assert 0 < kept <= budget
    assert 0 < reading["kept"] <= budget
    assert reading["kept"] == reading["expected"]
    assert {*reading["chosen"].values()} != {"nothing"}


def test_a_budget_that_no_choice_meets_is_logged_with_the_least(gloo_pool: GlooPool) -> None:
    values = {**DENSE, **WHOLE}
    (reading,) = gloo_pool.run(readings, 1, {**values, BUDGET: 0.001})
    inputs = 2 * 16 * 32 * 4  # of two layers
    assert reading["least"] == reading["expected"] == reading["kept"] == inputs
    assert reading["chosen"] == {"0": "layer", "1": "layer"}
    (least,) = gloo_pool.run(readings, 1, {**values, BUDGET: inputs / MIB})
    assert least["chosen"] == reading["chosen"]


def test_forwards_in_flight_of_a_pipeline_share_the_budget(gloo_pool: GlooPool) -> None:
    """Two micro-batches wait on the first of two ranks, one on the last."""
    pipeline = {"parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 4}
    values = {**DENSE, **WHOLE, **pipeline, BUDGET: 100.0}
    first, last = gloo_pool.run(readings, 2, values)
    assert first["kept"] == first["expected"] == 2 * last["kept"]
    between = {**values, BUDGET: 1.5 * last["kept"] / MIB}
    first, last = gloo_pool.run(readings, 2, between)
    assert first["chosen"]["0"] != "nothing"
    assert last["chosen"] == {"1": "nothing"}
    assert first["kept"] <= 1.5 * last["kept"]


def test_chunks_of_a_pipeline_share_the_budget_moment_by_moment(gloo_pool: GlooPool) -> None:
    """The most forwards of one chunk wait when fewer of the other one do: by the most of each, six
    layers would wait on the first rank."""
    values = {**DENSE, **WHOLE, **INTERLEAVED}
    first, last = gloo_pool.run(readings, 2, {**values, BUDGET: 100.0})
    layer = first["expected"] / 5  # of one forward: five wait, of two chunks with one layer each
    assert first["kept"] == first["expected"] == 5 * layer
    assert last["kept"] == last["expected"] == 3 * layer
    first, _ = gloo_pool.run(readings, 2, {**values, BUDGET: 5 * layer / MIB})
    assert {*first["chosen"].values()} == {"nothing"}


def decided(kept: Sequence[int], budget: int) -> dict[str, str]:
    """Return what two layers recompute that keep other bytes on each rank. A rank's job."""
    with standing_rank({**DENSE, **TP}) as (_, context):
        layers = []
        for at in range(2):
            module = nn.Module()
            module.layer_number = at + 1  # type: ignore[assignment]
            layer = Layer(module, (0, at))
            sizes = dict.fromkeys(CHOICES, NEVER)
            sizes |= {again(): kept[context.layout.rank], again("mlp"): 10, again(""): 5}
            layer.add(sizes, {}, {"": 9_000, "mlp": 4_000 - 1_000 * context.layout.rank})
            layers.append(layer)
        found = decide(layers, {(1, 1)}, context.groups, torch.device("cpu"), budget)
        assert found is not None
        found.apply()
        assert [each.chosen for each in layers] == [again("mlp"), again()]
        return found.by_layer()


def test_ranks_that_measure_otherwise_decide_alike(gloo_pool: GlooPool) -> None:
    """By the larger of both: 20 bytes of 16, in which two layers do not fit in 39."""
    first, second = gloo_pool.run(decided, 2, (16, 20), 39)
    assert first == second == {"0": "mlp", "1": "nothing"}
