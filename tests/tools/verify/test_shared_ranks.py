"""Which runs share ranks; the pool itself is replaced."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ascend_run.testing import pool
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.capture import record
from ascend_run.tools.verify.questions import Question, Side
from ascend_run.tools.verify.ranks import NoVerdict
from ascend_run.tools.verify.shared_ranks import SharedRanks
from ascend_run.tools.verify.sides import sides_of


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What happens to pools: started and closed ones, and the world size of jobs."""
    seen: list[tuple[Any, ...]] = []

    def note(name: str) -> Any:
        return lambda pool, *args, **_: seen.append((name, id(pool), *args[:1]))

    for name in ("start", "close"):
        monkeypatch.setattr(GlooPool, name, note(name))
    monkeypatch.setattr(GlooPool, "run", lambda pool, job, size, *_, **__: note("run")(pool, size))
    monkeypatch.setattr(record, "read_records", lambda folder, size: [size])
    return seen


def pools(calls: list[tuple[Any, ...]]) -> int:
    return len({pool for _, pool, *_ in calls})


def sides(*enable: str, **layout: int) -> tuple[Side, Side]:
    """The plain run, and the candidate."""
    found = sides_of(Question(enable=enable, layout=layout))
    return found.plain, found.candidate


@pytest.mark.needs_plugins("swap-attention")
def test_ranks_are_shared_until_a_run_lacks_their_plugins(calls: list[tuple[Any, ...]]) -> None:
    plain, candidate = sides("swap-attention", dp=2)
    before = dict(os.environ)
    with SharedRanks(9.0) as ranks:
        ranks.start([plain, candidate])
        assert [ranks(side) for side in (plain, candidate, candidate)] == [[1], [2], [2]]
        assert [name for name, *_ in calls] == ["start", "run", "run", "run"]
        assert calls[0][2] == 2
        ranks(plain)
        assert [name for name, *_ in calls[4:]] == ["close", "run"]
    assert pools(calls) == 1
    assert os.environ == before


@pytest.mark.needs_plugins("deterministic")
def test_another_environment_has_ranks_of_its_own(calls: list[tuple[Any, ...]]) -> None:
    plain, candidate = sides("deterministic", dp=2)
    with SharedRanks(9.0) as ranks:
        ranks.start([plain, candidate])
        for side in (plain, candidate, plain):
            ranks(side)
    assert pools(calls) == 2
    assert [name for name, *_ in calls] == ["start", "start", "run", "run", "run", "close", "close"]


def test_a_slow_start_of_ranks_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    with SharedRanks(0.01) as ranks, pytest.raises(NoVerdict) as caught:
        ranks(sides()[0])
    assert "the process was not ready 0.01 s after its start" in str(caught.value)
    assert "or raise the timeout with --timeout" in str(caught.value)
