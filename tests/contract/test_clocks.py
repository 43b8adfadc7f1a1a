"""No test is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.clock_assertions import clock_assertions

TESTS = Path(__file__).parent.parent
PLANTED = [
    "start = time.perf_counter(); work(); assert time.perf_counter() - start < 2",
    "from time import monotonic as now\nbegan = now()\nassert now() <= began + 1",
    "spent = []\nspent.append(os.times()[0] - before)\nassert min(spent) < 3",
    "def seconds():\n return time.time() - start\ndef test():\n assert 5 > seconds()",
    "best = float('inf')\nbest = min(best, timeit.timeit(work))\nassert ok and best < 1",
    "taken = [time.process_time()]\nassert statistics.median(taken) < 1",
    "total = 0.0\ntotal += time.monotonic()\nhalf: float = total / 2\nassert half < 1",
    "assert line['step_seconds'] < 1",
]
HARMLESS = [
    "deadline = time.monotonic() + 20\nwhile not there() and time.monotonic() < deadline:\n wait()",
    "answer = receive(time.monotonic() + 30)\nassert answer == 1",
    "done = run(timeout=60)\nassert done.returncode == 0",
    "clock.now = 3.0\nassert clock.now < 5",
    "began = time.time()\nassert started(began)",
    "assert answer['seconds'] > 0",
    "assert line['step_seconds'] == 3.0",
]


def test_no_test_asserts_on_a_clock() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{problem}"
        for path in TESTS.rglob("*.py")
        for problem in clock_assertions(path.read_text(encoding="utf-8"))
    }
    assert not found, "time it by a row of benchmarks, and assert what is counted instead"


@pytest.mark.parametrize("source", PLANTED)
def test_an_assertion_on_a_clock_is_found(source: str) -> None:
    assert len([*clock_assertions(source)]) == 1


@pytest.mark.parametrize("source", HARMLESS)
def test_what_asserts_nothing_of_a_clock_is_left_alone(source: str) -> None:
    assert [*clock_assertions(source)] == []


def test_examples_of_property_tests_have_no_time_limit() -> None:
    """Of all that name none: by default each may take a fifth of a second."""
    assert settings().deadline is None
