"""The campaign ``together``: its cases have every pair in every layout, the committed result is of
all of them and passes, and a set that fails is reduced.

``tests/contract/test_together.py`` runs a sample.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.resolution import resolve
from ascend_run.testing.parity import Case
from ascend_run.testing.runtime import load_runtime
from benchmarks.campaigns import set_cases, together
from benchmarks.campaigns.campaign import PASSED, digest, is_full, read_result, result_path
from benchmarks.campaigns.features import IN_SETS, LAYOUTS, settled

RESULT = read_result(together.CAMPAIGN.name)
FEATURES = RESULT["figures"]["features"]


@functools.cache
def cases() -> list[dict[str, Any]]:
    """Return all cases; building them takes seconds, so not while tests are collected."""
    return [json.loads(case) for case in together.cases(together.CAMPAIGN.seed)]


@pytest.mark.needs_plugins(*FEATURES)
def test_the_committed_result_is_of_all_cases_and_passes() -> None:
    assert is_full(together.CAMPAIGN, RESULT)
    assert RESULT["counts"] == {PASSED: RESULT["cases"]}


@pytest.mark.needs_plugins(*FEATURES)
def test_the_committed_result_has_a_record_of_every_case() -> None:
    names = [name for group in RESULT["records"] for name in group["cases"].split()]
    assert Counter(names) == Counter(map(digest, together.cases(together.CAMPAIGN.seed)))
    assert result_path(together.CAMPAIGN.name).stat().st_size < 200_000


@pytest.mark.needs_plugins(*FEATURES)
def test_every_feature_has_a_record() -> None:
    assert [*settled()] == FEATURES


def test_every_feature_was_compared_and_what_was_refused_says_why() -> None:
    figures = RESULT["figures"]
    assert figures["cases of each feature"].keys() == {*FEATURES}
    assert figures["compared"] + sum(figures["refused"].values()) == RESULT["cases"]
    assert figures["refused"]
    assert [row for row in figures["refused"] if not row.partition(": ")[2].strip()] == []


@pytest.mark.parametrize("recompute", [False, True], ids=["", "full recompute"])
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_every_allowed_pair_is_compared_or_refused_with_a_reason(
    model: str, layout: dict[str, int], recompute: bool
) -> None:
    there = [case for case in cases() if (case["model"], case["layout"]) == (model, layout)]
    there = [c for c in there if ("model.recompute_granularity" in c["config"]) is recompute]
    refused = [frozenset(case["plugins"]) for case in there if case.get("refused")]
    runs = [{*c["plugins"], *c["beside"]} for c in there if not c.get("refused")]
    covered = {frozenset(pair) for names in runs for pair in combinations(names, 2)}
    expected = {pair for pair in allowed_pairs() if not any(r <= pair for r in refused)}

    assert expected <= covered
    assert not any(r <= names for r in refused for names in runs)
    alone = {name for name in settled() if frozenset({name}) not in refused}
    assert alone == set().union(*runs)


@functools.cache
def allowed_pairs() -> list[frozenset[str]]:
    classes = discover().load(settled())

    def allowed(pair: tuple[str, str]) -> bool:
        try:
            resolve(pair, classes)
        except AscendRunError:
            return False
        return True

    return [frozenset(pair) for pair in combinations(settled(), 2) if allowed(pair)]


def test_what_is_refused_is_a_pair_or_less_and_planning_refuses_it() -> None:
    for asked in (case for case in cases() if case.get("refused")):
        assert len(asked["plugins"]) <= 2
        case = Case(
            plugins=(*asked["plugins"], *asked["beside"]),
            **{key: asked[key] for key in ("model", "layout", "config")},
            options=IN_SETS,
        )
        trial = case.trial(case.plugins, steps=0, sharded=True)
        assert load_runtime().examine(trial, case.world_size).problems, asked


def test_one_feature_exchanges_a_sequence_that_is_split() -> None:
    classes = discover().load(settled())
    exchanging = {n for n, found in classes.items() if Claim.CONTEXT_PARALLEL in claims_of(found)}
    for case in cases():
        if "cp" in case["layout"]:
            assert len(exchanging & {*case["plugins"], *case["beside"]}) == 1, case


def test_every_case_has_a_key_of_its_own_and_all_take_less_than_an_hour() -> None:
    keys = together.cases(together.CAMPAIGN.seed)
    assert len({*keys}) == len(keys)
    assert len(keys) / RESULT["cases"] * RESULT["seconds_of_last_call"] <= 3600


@functools.cache
def large() -> dict[str, Any]:
    """Return a case with the most features in which the sequence is split."""
    return max((c for c in cases() if "cp" in c["layout"]), key=lambda c: len(c["plugins"]))


def outcome(monkeypatch: pytest.MonkeyPatch, fails: Callable[[set[str], int], bool]) -> Any:
    """Run a large case of which sets fail by a predicate of names and the count of calls."""
    calls: list[set[str]] = []

    def parity(plugins: tuple[str, ...], **_: Any) -> None:
        calls.append({*plugins})
        if fails({*plugins}, len(calls)):
            raise AssertionError(f"{len(plugins)} plugins fail")

    monkeypatch.setattr(together, "_parity", lambda: parity)
    monkeypatch.setattr(together, "new_parity", lambda: parity)
    return together.run(json.dumps(large()))


@pytest.mark.parametrize("count", [1, 2])
def test_a_set_that_fails_is_reduced_to_its_culprits(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    culprits = [large()["plugins"][1], large()["plugins"][-2]][:count]
    found = outcome(monkeypatch, lambda names, call: {*culprits} <= names)
    assert (found["verdict"], found["smallest"]) == ("fails", culprits)
    assert found["error"] == f"AssertionError: {count} plugins fail"
    assert found["why"] == f"AssertionError: {len(large()['plugins'])} plugins fail"


def test_a_set_that_fails_once_is_not_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(monkeypatch, lambda names, call: call == 1)
    assert found["verdict"] == "not reproducible"
    assert "smallest" not in found


def test_a_set_that_passes_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, lambda names, call: call > 1) == {
        "verdict": PASSED,
        "compared": True,
    }


def test_a_case_is_not_refused_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_cases, "problems_of", lambda asked: ["no"])
    assert together.run(json.dumps(large())) == {"verdict": "refused", "refused": "no"}
    monkeypatch.setattr(set_cases, "problems_of", lambda asked: [])
    refused = json.dumps({**large(), "refused": True})
    assert together.run(refused) == {"verdict": "not refused"}


def test_a_feature_reaches_the_cases_that_hold_it() -> None:
    keys = [json.dumps(case) for case in cases()[:40]]
    by_set: dict[frozenset[str], set[str]] = {}
    for key in keys:
        case = json.loads(key)
        by_set.setdefault(frozenset((*case["plugins"], *case["beside"])), set()).add(
            together.reach(key)
        )
    hashes = [found for several in by_set.values() for found in several]
    assert len(hashes) == len({*hashes}) == len(by_set)
