"""What 20 silent plugins cost in a step is proven by counting the calls of a true run."""

from __future__ import annotations

import dis
from pathlib import Path

from ascend_run.core.hooks import Hooks
from benchmarks import listener_worker
from benchmarks.listeners import PLUGINS, STEP_EVENTS
from benchmarks.silent_plugins import listener_names, silent_plugins
from tests.benchmarks.tiny_run import STEPS, tiny_run
from tests.support.forked import printed_by


def test_each_event_of_a_step_calls_each_listener_exactly_once(tmp_path: Path) -> None:
    """Nothing else is called."""
    words = [*tiny_run(tmp_path), "--listeners", str(PLUGINS)]
    found = printed_by(listener_worker.main, words, tmp_path)
    a_step = dict.fromkeys(STEP_EVENTS, PLUGINS * STEPS)
    once = dict.fromkeys(("ascend_before_run", "ascend_after_run"), PLUGINS)
    assert found["steps"] == STEPS
    assert found["calls"] == {**a_step, **once}


def test_a_silent_plugin_implements_every_listener() -> None:
    """Each adds one call to an event; what is common to all names a listener that raises."""

    def num_calls(count: int, event: str) -> int:
        chain = dis.get_instructions(Hooks(silent_plugins(count)).event(event))
        return sum(instruction.opname.startswith("CALL") for instruction in chain)

    assert {*STEP_EVENTS} < {*listener_names()}
    for event in listener_names():
        assert num_calls(PLUGINS, event) - num_calls(1, event) == PLUGINS - 1, event
