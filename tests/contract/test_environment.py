"""What a test does to the environment ends with it, or later tests would need other servers."""

from __future__ import annotations

import os

import pytest

BY_A_TEST, BY_A_FIXTURE = "ASCEND_RUN_SET_BY_A_TEST", "ASCEND_RUN_SET_BY_A_FIXTURE"


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_sets_is_gone_before_the_next_one(turn: int) -> None:
    assert BY_A_TEST not in os.environ
    os.environ[BY_A_TEST] = str(turn)


@pytest.fixture(scope="module")
def shared() -> str:
    os.environ[BY_A_FIXTURE] = "1"
    return BY_A_FIXTURE


@pytest.fixture
def own(shared: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(BY_A_TEST, "1")
    return BY_A_TEST


def test_what_a_fixture_of_several_tests_sets_is_gone_at_once(shared: str, own: str) -> None:
    assert shared not in os.environ
    assert os.environ[own] == "1"
