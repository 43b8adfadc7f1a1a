"""The campaigns of ``verify``: committed results are full and pass, and a sample runs again."""

from __future__ import annotations

import warnings

import pytest

from ascend_run.plugin_api.testing.pool import GlooPool
from benchmarks.campaigns import verify_bugs, verify_clean
from benchmarks.campaigns.campaign import PASSED, is_full, read_result, sample
from benchmarks.campaigns.removal import FEATURES
from benchmarks.campaigns.seeded_bugs import blind
from benchmarks.campaigns.seeded_bugs.bug import Bug
from benchmarks.campaigns.seeded_bugs.faults import BUGS
from benchmarks.campaigns.seeded_bugs.mutation import mutated, resolve
from tests.support import mutated_code
from tests.support.needed_plugins import names_of

SAMPLED = sample(verify_bugs.CAMPAIGN, 3, seed=5)


def plugins_of(bug: Bug) -> set[str]:
    """Those that it is run with, and the one whose code it is in."""
    module = bug.target.partition("ascend_run.plugins.")[2].partition(":")[0].partition(".")[0]
    return {*bug.plugins, *([module.replace("_", "-")] if module else [])}


@pytest.fixture
def ranks(gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's ranks in place of the campaigns' own."""
    for module in (verify_bugs, verify_clean):
        monkeypatch.setattr(module, "pool", lambda: gloo_pool)
    verify_clean._verifier.cache_clear()


@pytest.mark.parametrize("module", [verify_bugs, verify_clean], ids=lambda m: m.CAMPAIGN.name)
def test_the_committed_result_is_full_and_passes(module: object) -> None:
    campaign = module.CAMPAIGN  # type: ignore[attr-defined]
    result = read_result(campaign.name)
    assert is_full(campaign, result)
    assert campaign.passes(result["figures"], result["counts"])
    assert result["passes"]


def test_there_are_as_many_bugs_as_asked_and_twenty_by_one_who_had_not_read_verify() -> None:
    assert len(BUGS) >= 60
    assert len(blind.BUGS) >= 20


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("case", names_of({c: BUGS[c] for c in SAMPLED}, plugins_of))
def test_seeded_bugs_are_found_again(case: str) -> None:
    assert verify_bugs.CAMPAIGN.run(case)["verdict"] == PASSED


@pytest.mark.usefixtures("ranks")
@pytest.mark.needs_plugins(*FEATURES)
@pytest.mark.parametrize("case", sample(verify_clean.CAMPAIGN, 2))
def test_nothing_is_found_where_nothing_is(case: str) -> None:
    assert verify_clean.CAMPAIGN.run(case)["verdict"] == PASSED


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


def test_a_text_that_is_not_there_is_told() -> None:
    with (
        pytest.raises(LookupError, match="stands there 0 times"),
        mutated("tests.support.mutated_code:cached", "x * 10", "x"),
    ):
        pass
