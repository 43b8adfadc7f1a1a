"""Compare the step time that ``plan`` estimates with measured steps on this machine's CPU.

The machine is calibrated in the same session (``cpu_calibration``), so that the row shows the error
of the cost model, not outdated constants.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from .protocol import ROOT, Benchmark, Settings, device, run
from .rows import Row, bounded
from .start_up import ASCEND_RUN
from .tiny_data import make_tiny_data

EXAMPLES: Final = ("dense", "demo")
LIMIT_PERCENT: Final = 30
PARTS: Final = ("matmuls", "memory", "operations", "communication")
"""Of the estimate, in the note of a row."""
_STEPS: Final = 5
"""Multiple of ``Settings.steps`` to time."""
_OWN_THREADS: Final = ("env", "-u", "OMP_NUM_THREADS", "-u", "MKL_NUM_THREADS")
"""Let the platform choose the number of threads per rank, as in any run."""


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=name_of(example),
            goal=f"<= {LIMIT_PERCENT:g} %",
            measure=functools.partial(_measure, example),
        )
        for example in EXAMPLES
    ]


def name_of(example: str) -> str:
    return f"plan's step time for examples/{example}.toml on the CPU, off by"


def off_by(predicted: float, measured: float) -> float:
    """Return the relative error of the prediction, in percent."""
    return 100 * abs(predicted / measured - 1)


def _measure(example: str, settings: Settings) -> Row:
    settings.report(f"{name_of(example)}: calibration")
    file = _calibrated()
    settings.report(name_of(example))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = make_tiny_data(folder, [sys.executable, "-m", "ascend_run"])
        words = ["--config", ROOT / "examples" / f"{example}.toml"]
        words += _only_steps(folder, prefix, _STEPS * settings.steps)
        expected = _expected(words, file)
        run([*_OWN_THREADS, ASCEND_RUN, *words])
        measured = _step_seconds(folder / "run")
    predicted = expected["step"]
    return bounded(
        name=name_of(example),
        value=off_by(predicted, measured),
        unit="%",
        limit=LIMIT_PERCENT,
        note=f"{1e3 * predicted:.1f} ms expected ("
        + ", ".join(f"{part} {1e3 * expected[part]:.1f}" for part in PARTS)
        + f"), {1e3 * measured:.1f} ms measured",
        device=device(),
    )


@functools.cache
def _calibrated() -> Path:
    """Calibrate this machine, once for all rows."""
    path = Path(tempfile.mkdtemp(prefix="calibration-")) / "cpu.json"
    run([*_OWN_THREADS, sys.executable, "-m", "benchmarks.cpu_calibration", path])
    return path


def _expected(words: list[str | Path], file: Path) -> dict[str, Any]:
    """The section ``time`` of the plan."""
    done = run([ASCEND_RUN, "plan", *words, "--device", file, "--json"])
    found: dict[str, Any] = json.loads(done.stdout)["cost"]["time"]
    return found


def _only_steps(folder: Path, prefix: Path, steps: int) -> list[str]:
    """Return the example's model, batch and ranks, without evaluation and checkpoints."""
    return [
        f"run.output_dir={folder / 'run'}",
        f"data.train={prefix}",
        "data.validation=",
        f"data.tokenizer={prefix.parent / 'tokenizer.json'}",
        f"train.train_iters={steps}",
        "train.log_interval=1",
        "train.eval_interval=0",
        "checkpoint.save_interval=0",
    ]


def _step_seconds(folder: Path) -> float:
    """The median, without the first third, which is the warm-up."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    seconds = [record["step_seconds"] for record in records if "loss" in record]
    return statistics.median(seconds[len(seconds) // 3 :])
