"""Time one event with several listeners, with our and pluggy's calls alternately; prints one JSON
line.

Nanoseconds per call, without the loop around it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pluggy

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import hookspecs
from ascend_run.plugin_api.hook_kinds import PROJECT

from .silent_plugins import silent_plugins

EVENT = "ascend_after_step"
BURSTS = 20


def nanoseconds(event: Callable[..., Any], calls: int) -> float:
    """Return the time of one call, without the loop: the minimum of several bursts."""
    burst = max(1, calls // BURSTS)
    with_event = min(_with_event(event, burst) for _ in range(BURSTS))
    empty = min(_empty(burst) for _ in range(BURSTS))
    return (with_event - empty) / burst


def _with_event(event: Callable[..., Any], calls: int) -> int:
    context = object()
    turns = repeat(None, calls)
    begin = time.perf_counter_ns()
    for _ in turns:
        event(context=context)
    return time.perf_counter_ns() - begin


def _empty(calls: int) -> int:
    turns = repeat(None, calls)
    begin = time.perf_counter_ns()
    for _ in turns:
        pass
    return time.perf_counter_ns() - begin


def pluggy_call(plugins: list[Any]) -> Callable[..., Any]:
    """Return the same listeners, called by pluggy."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        manager.register(plugin)
    caller: Callable[..., Any] = getattr(manager.hook, EVENT)
    return caller


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listeners", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200_000)
    options = parser.parse_args()
    plugins = silent_plugins(options.listeners)
    ours, peer = Hooks(plugins).event(EVENT), pluggy_call(plugins)
    for warm_up in (ours, peer):
        nanoseconds(warm_up, options.calls // 10)
    pairs = [
        (nanoseconds(ours, options.calls), nanoseconds(peer, options.calls // 10))
        for _ in range(options.pairs)
    ]
    print(json.dumps({"ours": [pair[0] for pair in pairs], "peer": [pair[1] for pair in pairs]}))


if __name__ == "__main__":
    main()
