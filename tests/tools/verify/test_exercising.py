"""A plugin that does nothing is not exercised; one that acts is, though no number changes."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.capture.record import read_records, write_record
from ascend_run.tools.verify.compare.effects import effects
from ascend_run.tools.verify.compare.verdict import Outcome
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from ascend_run.tools.verify.verifier import Verifier
from benchmarks.campaigns.campaign import sample
from benchmarks.campaigns.verify_idle import CAMPAIGN, PLUGINS
from tests.tools.verify import acting_plugins
from tests.tools.verify.acting_plugins import ACTING

SCALES_BY_ONE = PLUGINS["mlp-scales-by-one"].plugin
ON_ONE_RANK = [
    idle.plugin
    for idle in map(PLUGINS.__getitem__, sample(CAMPAIGN, 6, seed=3))
    if not idle.layout and idle.model is None
]


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


@pytest.fixture(scope="module")
def ranks(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the steps of a side; cached."""
    made: dict[str, Any] = {}

    def run(side: Any) -> Any:
        side = attrs.evolve(side, only_steps=True, by_differences=False, keeps_samples=False)
        key = str(attrs.evolve(side, name=""))
        if key not in made:
            folder = tmp_path_factory.mktemp("records")
            for record in PoolRanks(gloo_pool)(side):
                write_record(record, folder)
            made[key] = read_records(folder, side.world_size)
        return made[key]

    return run


def effects_of(ranks: Any, plugin: type[Any], *beside: type[Any]) -> Any:
    """What is seen of a plugin on one rank."""
    names = [found.manifest.name for found in (plugin, *beside)]
    with offered(plugin, *beside):
        sides = sides_of(Question(enable=tuple(names), layout={}, steps=3))
        left_out = sides.left_out[0]
        assert left_out.without is not None
        return effects(ranks(sides.candidate), ranks(left_out.without))


@pytest.mark.exhaustive(by=lambda plugin: [])
@pytest.mark.parametrize("plugin", ON_ONE_RANK, ids=lambda plugin: plugin.manifest.name)
def test_a_plugin_that_does_nothing_is_not_exercised(plugin: type[Any], ranks: Any) -> None:
    assert effects_of(ranks, plugin).evidence == ()


@pytest.mark.exhaustive(by=lambda plugin: ())
@pytest.mark.parametrize("plugin", ACTING, ids=lambda plugin: plugin.manifest.name)
def test_a_plugin_that_acts_is_exercised(plugin: type[Any], ranks: Any) -> None:
    evidence = effects_of(ranks, plugin).evidence
    assert any(seen.startswith(ACTING[plugin]) for seen in evidence), evidence


def test_what_another_plugin_does_is_not_counted(ranks: Any) -> None:
    found = effects_of(ranks, SCALES_BY_ONE, acting_plugins.WritesAFile)
    assert found.evidence == ()


def test_the_verdict_of_an_idle_plugin_is_not_exercised(verify: Verifier) -> None:
    with offered(SCALES_BY_ONE):
        verdict = verify(Question(enable=("mlp-scales-by-one",), layout={}))
    assert all(check.passed for check in verdict.checks)
    assert verdict.outcome is Outcome.NOT_EXERCISED
    assert not verdict.good
    assert verdict.sentence() == "not exercised: mlp-scales-by-one"
    assert "operations that change nothing: +16 mul" in verdict.exercises[0].why


def test_a_plugin_on_one_rank_is_compared_with_the_plain_run() -> None:
    """Which is run anyway."""
    with offered(SCALES_BY_ONE):
        sides = sides_of(Question(enable=("mlp-scales-by-one",), layout={}))
    assert sides.left_out[0].without == sides.plain
    notes = sides_of(Question(layout={})).notes
    assert any(note.startswith("both runs are the same: only the oracle") for note in notes)


def test_the_built_in_model_meets_hard_cases(verify: Verifier) -> None:
    verdict = verify(Question(layout={"dp": 2}, model="moe"))
    assert verdict.outcome is Outcome.WITHIN
    missing = {case.name for case in verdict.cases if case.occurred is False}
    assert missing == {"several documents in a row"}
    assert len([case for case in verdict.cases if case.occurred]) >= 13
    (ties,) = [case for case in verdict.cases if case.name.startswith("equal scores")]
    assert ties.detail == "decoder.layers.1.mlp.router"


def test_gradients_that_are_all_zero_exercise_nothing(verify: Verifier) -> None:
    verdict = verify(Question(layout={}, config={"model.init_method_std": 0.0}))
    assert verdict.sentence() == "not exercised: gradients"


@pytest.mark.needs_plugins("gmm")
def test_a_plugin_that_is_idle_is_not_exercised(verify: Verifier) -> None:
    verdict = verify(Question(enable=("gmm",), layout={}, model="dense"))
    assert verdict.sentence() == "not exercised: gmm"
    (exercise,) = verdict.exercises
    assert "there are no experts" in exercise.why
    assert exercise.fix == "set model.num_moe_experts"


@pytest.mark.needs_plugins("swap-attention")
def test_thresholds_are_scaled_down_unless_the_user_sets_them() -> None:
    question = Question(enable=("swap-attention",), layout={})
    sides = sides_of(question)
    assert sides.candidate.prepare().config.plugins["swap-attention"].min_bytes == 1
    assert any("plugins.swap-attention.min_bytes=1" in note for note in sides.notes)
    own = attrs.evolve(question, overrides=("plugins.swap-attention.min_bytes=4096",))
    sides = sides_of(own)
    assert sides.candidate.prepare().config.plugins["swap-attention"].min_bytes == 4096
    assert not any("min_bytes" in note for note in sides.notes)
    assert sides.left_out[0].fix == "set plugins.swap-attention.min_bytes=1"


@pytest.mark.needs_plugins("eod-reset")
def test_settings_that_the_users_options_exclude_are_not_made() -> None:
    """``document_length`` ends documents in place of the token."""
    overrides = ("plugins.eod-reset.document_length=11",)
    sides = sides_of(Question(enable=("eod-reset",), layout={}, overrides=overrides))
    options = sides.candidate.prepare().config.plugins["eod-reset"]
    assert (options.document_length, options.eod_token_id) == (11, None)
    assert not any("eod_token_id" in note for note in sides.notes)


@pytest.mark.needs_plugins("low-precision-optimizer", "ema-adamw")
def test_steps_have_the_learning_rate_that_a_plugin_declares() -> None:
    """What rounding changes in another layout stays below the tolerance with it."""
    for name, expected in (("low-precision-optimizer", 5e-6), ("ema-adamw", 1e-3)):
        own = Question(enable=(name,), layout={"tp": 2}, config={"optimizer.lr": 0.5})
        sides = sides_of(own)
        of_both = [side.values["optimizer.lr"] for side in (sides.candidate, sides.plain)]
        assert of_both == [expected] * 2
