"""The campaigns of ``verify``: committed results are full and pass, and a sample runs again."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from typing import Any

import pytest

from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.compare.verdict import Phase
from benchmarks.campaigns import (
    verify_bugs,
    verify_bugs_second,
    verify_clean,
    verify_clean_newer,
    verify_idle,
)
from benchmarks.campaigns.campaign import PASSED, Campaign, is_full, read_result, sample
from benchmarks.campaigns.features import settled
from benchmarks.campaigns.removal import FEATURES
from benchmarks.campaigns.seeded_bugs import blind, blind_second, blind_second_states
from benchmarks.campaigns.seeded_bugs.bug import Bug
from benchmarks.campaigns.seeded_bugs.faults import BUGS
from benchmarks.campaigns.seeded_bugs.mutation import mutated, resolve
from tests.support import mutated_code
from tests.support.needed_plugins import names_of

BUGGY = (verify_bugs.CAMPAIGN, verify_bugs_second.CAMPAIGN)
SAMPLED = sample(BUGGY[0], 1, seed=5)


def plugins_of(bug: Bug) -> set[str]:
    """Those that it is run with, and the one whose code it is in; a group's own module has none."""
    module = bug.target.partition("ascend_run.plugins.")[2].partition(":")[0]
    return {*bug.plugins, *(name.replace("_", "-") for name in module.split(".")[1:2])}


@pytest.fixture
def ranks(gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's ranks in place of the campaigns' own."""
    for module in (verify_bugs, verify_clean, verify_idle):  # newer draws run as the clean ones
        monkeypatch.setattr(module, "pool", lambda: gloo_pool)
    verify_clean._verifier.cache_clear()
    verify_idle._verifier.cache_clear()


def test_clean_draws_have_dropout_of_both_kinds() -> None:
    draws = [json.loads(case)["config"] for case in verify_clean.CAMPAIGN.cases(20261122)]
    assert len(draws) == verify_clean.COUNT
    for kind in ("model.hidden_dropout", "model.attention_dropout"):
        assert sum(kind in config for config in draws) > 20


@pytest.mark.parametrize(
    "module",
    [verify_bugs, verify_clean, verify_idle],
    ids=lambda m: m.CAMPAIGN.name,
)
def test_the_committed_result_is_full_and_passes(module: object) -> None:
    campaign = module.CAMPAIGN  # type: ignore[attr-defined]
    result = read_result(campaign.name)
    assert is_full(campaign, result)
    assert campaign.passes(result["figures"], result["counts"])
    assert result["passes"]


@pytest.mark.needs_plugins(*read_result("together")["figures"]["features"])
def test_the_committed_result_of_newer_features_is_full_and_passes() -> None:
    drawn = read_result(verify_clean_newer.CAMPAIGN.name)["figures"]["combinations of each feature"]
    assert {*verify_clean_newer.newer()} <= {*drawn}
    test_the_committed_result_is_full_and_passes(verify_clean_newer)


def test_the_number_of_bugs_and_of_blind_bugs_meets_the_goal() -> None:
    """Of the first set, at least twenty bugs are by an author who had not read ``verify``; of the
    second, thirty."""
    assert all(len(campaign.cases(0)) >= 60 for campaign in BUGGY)
    assert len(blind.BUGS) >= 20
    assert len(blind_second.BUGS) + len(blind_second_states.BUGS) >= 30


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", names_of({c: BUGS[c] for c in SAMPLED}, plugins_of))
def test_seeded_bugs_are_found_again(case: str) -> None:
    outcome = verify_bugs.CAMPAIGN.run(case)
    assert outcome["verdict"] == PASSED
    assert outcome["loss is right"] or not BUGS[case].hides_from_loss


@pytest.mark.parametrize("campaign", BUGGY, ids=lambda campaign: campaign.name)
def test_bugs_that_are_said_to_leave_the_loss_right_do(campaign: Campaign) -> None:
    figures = read_result(campaign.name)["figures"]
    said = sum(BUGS[case].hides_from_loss for case in campaign.cases(0))
    assert figures["said to leave the loss right"] == said
    assert figures["of those, the loss is right"] == said


def test_every_bug_says_in_which_phase_it_acts() -> None:
    for bug in BUGS.values():
        assert bug.phases
        assert {*bug.phases} <= {*Phase}, bug.name


def test_an_outcome_counts_for_detected_place_phase_and_loss_by_itself() -> None:
    good = {
        "verdict": PASSED,
        "says": "DIVERGES",
        "names the place": True,
        "names the phase": True,
        "loss is right": True,
        "should hide from the loss": True,
    }
    outcomes = {
        "good": good,
        "elsewhere": {**good, "names the place": False},
        "other phase": {**good, "names the phase": False, "should hide from the loss": False},
        "claims too much": {**good, "loss is right": False},
        "not found": {**good, "verdict": "undetected", "names the phase": False},
        "raised": {"verdict": "error"},
    }
    figures = verify_bugs.figures(outcomes)
    assert figures["bugs"] == 6
    assert figures["found"] == 4
    assert figures["found at the right place"] == 3
    assert figures["found in the right phase"] == 3
    assert figures["found though the loss is right"] == 3
    assert figures["said to leave the loss right"] == 4
    assert figures["of those, the loss is right"] == 3
    assert figures["found at another place"] == {"elsewhere": "DIVERGES"}
    assert figures["found in another phase"] == {"other phase": "DIVERGES"}
    assert not verify_bugs.passes({**figures, "bugs": 60, "found": 60}, {})


def test_the_committed_result_of_the_second_set_is_full() -> None:
    """It misses the goal, which ``docs/verify.md`` says: 58 of 60 at the right place."""
    campaign = verify_bugs_second.CAMPAIGN
    result = read_result(campaign.name)
    assert is_full(campaign, result)
    assert campaign.passes(result["figures"], result["counts"]) is result["passes"]
    assert result["figures"]["found"] >= 0.96 * result["cases"]
    assert result["figures"]["found at the right place"] >= 0.92 * result["cases"]


def test_of_the_second_set_58_of_60_are_found_at_the_right_place() -> None:
    loss = {"of those, the loss is right": 40, "said to leave the loss right": 40}
    counted = {"bugs": 60, verify_bugs.BLIND: {"bugs": 30}, **loss}
    for place, enough in ((60, True), (58, True), (57, False)):
        figures = {**counted, "found": 60, "found at the right place": place}
        assert verify_bugs_second.passes(figures, {}) is enough
    figures["found at the right place"] = 60
    for lacking in ({"bugs": 59}, {verify_bugs.BLIND: {"bugs": 29}}, {loss.popitem()[0]: 39}):
        assert not verify_bugs_second.passes({**figures, **lacking}, {})


# Newer draws run as the older ones do.
@pytest.mark.exhaustive(by=lambda module: [module] if module is verify_clean else [])
@pytest.mark.usefixtures("ranks")
@pytest.mark.needs_plugins(*FEATURES)
@pytest.mark.parametrize(
    ("module", "seed"),
    [(verify_clean, 3), (verify_clean_newer, 5)],
    ids=lambda value: "" if isinstance(value, int) else value.CAMPAIGN.name,
)
def test_nothing_is_found_where_nothing_is(module: Any, seed: int) -> None:
    (case,) = sample(module.CAMPAIGN, 1, seed=seed)
    assert module.CAMPAIGN.run(case)["verdict"] == PASSED


def test_plugins_that_do_nothing_cover_the_hooks() -> None:
    """All but those of platforms, tasks and model families, of the choices that a machine makes,
    and of the sequence partition, which context parallelism needs."""
    hooks = {hook for idle in verify_idle.PLUGINS.values() for hook in implementations(idle.plugin)}
    assert {*hook_points()} - hooks == {
        "ascend_device",
        "ascend_machine_choices",
        "ascend_model_family",
        "ascend_platform_ops",
        "ascend_sequence_partition",
        "ascend_task",
    }
    assert len(verify_idle.PLUGINS) >= 40


@pytest.mark.exhaustive(by=lambda case: [])
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", sample(verify_idle.CAMPAIGN, 2, seed=1))
def test_a_plugin_that_does_nothing_is_not_exercised_again(case: str) -> None:
    outcome = verify_idle.CAMPAIGN.run(case)
    assert outcome["verdict"] == PASSED
    assert outcome["exit code"] == 1


def test_an_idle_plugin_with_an_effect_counts_as_called_proven() -> None:
    outcomes = {
        "plans-only": {"verdict": PASSED, "exit code": 1},
        "makes-a-group": {"verdict": "called proven", "exit code": 0},
        "measures-nothing": {"verdict": "error"},
    }
    figures = verify_idle.figures(outcomes)
    assert figures["called proven"] == 1
    assert figures["with exit code 1"] == 1
    counts = {"passed": 1, "called proven": 1, "error": 1}
    assert not verify_idle.CAMPAIGN.passes(figures, counts)


@pytest.mark.needs_plugins(*FEATURES)
def test_newer_draws_have_all_that_the_others_leave_out() -> None:
    campaign = verify_clean_newer.CAMPAIGN
    draws = [json.loads(case) for case in campaign.cases(campaign.seed)]
    drawn = Counter(name for draw in draws for name in draw["enable"])
    assert len(draws) == 4 * len(verify_clean_newer.newer())
    assert {*verify_clean_newer.newer(), *verify_clean.OLDER} == {*settled()}
    assert all(drawn[name] >= 4 for name in verify_clean_newer.newer())


@pytest.mark.needs_plugins(*FEATURES, "reuse-fp32-param")
def test_a_draw_has_the_settings_that_its_feature_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    name, draws = "reuse-fp32-param", random.Random(1)
    drawn = json.loads(verify_clean_newer._draw_another(name, draws, ()))
    assert name in drawn["enable"]
    assert drawn["config"]["train.precision"] == "bf16"
    monkeypatch.setattr(verify_clean_newer, "NEEDS", {})
    monkeypatch.setattr(verify_clean_newer, "TRIES", 3)
    with pytest.raises(LookupError, match="reuse-fp32-param: in none of 3 draws it can run"):
        verify_clean_newer._draw_another(name, draws, ())


@pytest.mark.needs_plugins(*FEATURES, "recompute", "recompute-comm-opt")
def test_a_draw_has_the_feature_that_its_own_acts_beside() -> None:
    drawn = json.loads(verify_clean_newer._draw_another("recompute-comm-opt", random.Random(1), ()))
    assert {*drawn["enable"]} >= {"recompute", "recompute-comm-opt"}


@pytest.mark.parametrize("name", names_of(BUGS, plugins_of))
def test_each_bug_is_a_patch_of_code_that_stands_there(name: str) -> None:
    bug = BUGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, where its modules are imported first
        found = resolve(bug.target)
    with mutated(bug.target, bug.old, bug.new):
        assert resolve(bug.target) is found


def test_no_bug_stands_there_twice() -> None:
    patches = {(b.target, b.old, b.new, str(b.plugins), str(b.layout)) for b in BUGS.values()}
    assert len(patches) == len(BUGS)


def test_a_mutation_runs_in_place_and_is_taken_back() -> None:
    held = mutated_code.Adder(2).add
    with mutated("tests.support.mutated_code:Adder.add", "self.by + x", "self.by - x"):
        assert held(5) == -3
        assert mutated_code.cached(1) == 11
        with mutated("tests.support.mutated_code:cached", "x + 10", "x + 20"):
            assert mutated_code.cached(1) == 21
        assert mutated_code.cached(1) == 11
    assert held(5) == 7


def test_a_missing_text_is_reported() -> None:
    with (
        pytest.raises(LookupError, match="stands there 0 times"),
        mutated("tests.support.mutated_code:cached", "x * 10", "x"),
    ):
        pass
