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
from tests.tools.verify import idle_plugins
from tests.tools.verify.idle_plugins import ACTING, IDLE


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


@pytest.fixture(scope="module")
def ranks(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the steps of a side; cached."""
    made: dict[str, Any] = {}

    def run(side: Any) -> Any:
        key = str(attrs.evolve(side, name="", only_steps=True))
        if key not in made:
            folder = tmp_path_factory.mktemp("records")
            for record in PoolRanks(gloo_pool)(attrs.evolve(side, only_steps=True)):
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


@pytest.mark.parametrize("plugin", IDLE, ids=lambda plugin: plugin.manifest.name)
def test_a_plugin_that_does_nothing_is_not_exercised(plugin: type[Any], ranks: Any) -> None:
    assert effects_of(ranks, plugin).evidence == ()


@pytest.mark.parametrize("plugin", ACTING, ids=lambda plugin: plugin.manifest.name)
def test_a_plugin_that_acts_is_exercised(plugin: type[Any], ranks: Any) -> None:
    (seen, *_) = effects_of(ranks, plugin).evidence
    assert seen.startswith(ACTING[plugin])


def test_what_another_plugin_does_is_not_counted(ranks: Any) -> None:
    found = effects_of(ranks, idle_plugins.ScalesByOne, idle_plugins.WritesAFile)
    assert found.evidence == ()


def test_the_verdict_of_an_idle_plugin_is_not_exercised(verify: Verifier) -> None:
    with offered(idle_plugins.ScalesByOne):
        verdict = verify(Question(enable=("scales-by-one",), layout={}))
    assert all(check.passed for check in verdict.checks)
    assert verdict.outcome is Outcome.NOT_EXERCISED
    assert not verdict.good
    assert verdict.sentence() == "not exercised: scales-by-one"
    assert "operations that change nothing: +16 mul" in verdict.exercises[0].why
