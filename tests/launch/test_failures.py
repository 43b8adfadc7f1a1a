from __future__ import annotations

import attrs
import pytest

from ascend_run.core.rank.failures import Failure, describe_failure
from ascend_run.launch.failures import RankRefusal, silent_failure, summarize
from ascend_run.plugin_api import DataError, RankFailure

EARLY = Failure(rank=2, time=1.0, phase="run", summary="ValueError: x", text="Traceback\nx")
LOST = Failure(rank=0, time=0.5, phase="run", summary="closed", text="closed", lost_peer=True)


def test_the_earliest_failure_stands_first_and_in_full() -> None:
    late = attrs.evolve(EARLY, rank=1, time=2.0, summary="KeyError: y", text="Traceback\ny")
    error = summarize([late, EARLY])
    assert str(error) == "rank 2: Traceback\nx\nrank 1: KeyError: y"
    assert (type(error), error.exit_code) == (RankFailure, 1)


def test_a_rank_that_lost_a_peer_is_not_the_first_failure() -> None:
    assert str(summarize([LOST, EARLY])).splitlines() == [
        "rank 2: Traceback",
        "x",
        "rank 0 then lost its connection to another rank",
    ]


def test_equal_errors_of_ranks_are_reported_once_as_user_errors() -> None:
    refusal = describe_failure(DataError("corrupt", ["file x"]), rank=0, phase="run")
    error = summarize([refusal, attrs.evolve(refusal, rank=1, time=refusal.time + 1)])
    assert str(error) == "rank 0: corrupt:\n  file x\nrank 1: same error"
    assert (type(error), error.exit_code) == (RankRefusal, 2)


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (-9, "rank 1 was killed by SIGKILL, as the system does when memory runs out"),
        (-11, "rank 1 was killed by SIGSEGV"),
        (-63, "rank 1 was killed by signal 63"),
        (5, "rank 1 ended with exit code 5"),
    ],
)
def test_a_rank_that_ended_without_a_word_is_named_with_its_end(exit_code: int, text: str) -> None:
    error = summarize([LOST, silent_failure(1, exit_code, 1.0)])
    assert str(error).splitlines()[0] == text
    assert error.exit_code == 1
