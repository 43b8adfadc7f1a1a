"""Cost of the kernel's events: one call, and 20 silent plugins in a step."""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from .protocol import ROOT, Benchmark, Settings, device, worker
from .rows import Row, bounded, failed, pair_ratios, spread
from .tiny_data import make_tiny_data

LIMIT_WITHOUT_NS: Final = 80.0
LIMIT_LISTENER_NS: Final = 120.0
LIMIT_STEP_PERCENT: Final = 0.2
PLUGINS: Final = 20
STEP_EVENTS: Final = ("ascend_before_step", "ascend_after_step", "ascend_after_log")
"""Events of every step of a run that logs every step, which is the maximum."""


def benchmarks() -> list[Benchmark]:
    """One row per number of listeners, and one for a whole step."""
    events = [
        Benchmark(
            name=_name(listeners),
            goal=f"<= {_limit(listeners):g} ns",
            measure=functools.partial(_measure_event, listeners),
        )
        for listeners in (0, 1, 5, 20)
    ]
    step = Benchmark(name=STEP_ROW, goal=f"<= {LIMIT_STEP_PERCENT:g} %", measure=_measure_step)
    return [*events, step]


STEP_ROW: Final = f"{PLUGINS} plugins on every listener, share of a demo step"


def _name(listeners: int) -> str:
    return f"event, {listeners} listener{'' if listeners == 1 else 's'} vs pluggy"


def _limit(listeners: int) -> float:
    return LIMIT_LISTENER_NS * listeners if listeners else LIMIT_WITHOUT_NS


def _time_event(listeners: int, pairs: int) -> dict[str, Any]:
    return worker("event_worker", "--listeners", str(listeners), "--pairs", str(pairs))


def _measure_event(listeners: int, settings: Settings) -> Row:
    settings.report(_name(listeners))
    found = _time_event(listeners, settings.pairs)
    ratios = pair_ratios(found["ours"], found["peer"], larger_is_better=False)
    return bounded(
        name=_name(listeners),
        value=statistics.median(found["ours"]),
        peer=statistics.median(found["peer"]),
        unit="ns",
        limit=_limit(listeners),
        note=f"{spread(ratios)}; net of the empty loop",
        device=device(),
    )


def _measure_step(settings: Settings) -> Row:
    """Calls counted in a real run, times the measured cost of one, relative to the step time."""
    settings.report(STEP_ROW)
    nanoseconds = statistics.median(_time_event(PLUGINS, settings.pairs)["ours"]) / PLUGINS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = make_tiny_data(folder, [sys.executable, "-m", "ascend_run"])
        found = worker("listener_worker", "--config", ROOT / "examples" / "demo.toml",
            "--listeners", str(PLUGINS), *demo_step(folder, prefix, 3 * settings.steps),
        )  # fmt: skip
    calls, steps = found["calls"], found["steps"]
    a_step = sum(calls.get(event, 0) for event in STEP_EVENTS) / steps
    seconds = found["step_seconds"]
    row = bounded(
        name=STEP_ROW,
        value=100 * a_step * nanoseconds * 1e-9 / seconds,
        unit="%",
        limit=LIMIT_STEP_PERCENT,
        note=f"{a_step:g} calls counted a step x {nanoseconds:.0f} ns / {1e3 * seconds:.0f} ms",
        device=device(),
    )
    if wrong := {e: n for e in STEP_EVENTS if (n := calls.get(e, 0)) != PLUGINS * steps}:
        return failed(row, f"expected {PLUGINS * steps} calls of each event, counted {wrong}")
    return row


def demo_step(folder: Path, prefix: Path, steps: int) -> list[str]:
    """Return the demo's model and batch on one rank, without evaluation and checkpoints."""
    return [
        f"run.output_dir={folder / 'run'}",
        "run.nproc=1",
        "parallel.context_parallel_size=1",
        "enable=gmm",
        f"data.train={prefix}",
        "data.validation=",
        f"data.tokenizer={prefix.parent / 'tokenizer.json'}",
        f"train.train_iters={steps}",
        "train.log_interval=1",
        "train.eval_interval=0",
        "checkpoint.save_interval=0",
    ]
