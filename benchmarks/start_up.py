"""Start-up time: from a command to its output, and to the first training step."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import attrs

from .many_packages import write_packages
from .protocol import Benchmark, NotMeasured, Settings, alternating, device, run, wall_seconds
from .rows import Row, bounded, compared
from .tiny_data import make_tiny_data

LIMIT_COMMAND_SECONDS: Final = 0.15
LIMIT_PLAN_SECONDS: Final = 0.3
LIMIT_LARGE_PLAN_SECONDS: Final = 3.0
LIMIT_VERIFY_SECONDS: Final = 20.0
LIMIT_FIRST_STEP: Final = 1.5
"""Limit relative to importing Megatron-core."""
ASCEND_RUN: Final = Path(sys.executable).with_name("ascend-run")
FIRST_STEP_ROW: Final = "command to first step vs import megatron.core"
PEER_RUNS: Final = 3

DEMO: Final = ("--config", "examples/demo.toml")
LARGE: Final = (
    *(*DEMO, "--world", "7968", "--disable", "ulysses"),
    *("parallel.tensor_model_parallel_size=8", "parallel.pipeline_model_parallel_size=4"),
    *("parallel.context_parallel_size=1", "parallel.expert_model_parallel_size=3"),
    *("parallel.expert_tensor_parallel_size=1", "parallel.sequence_parallel=true"),
    *("train.global_batch_size=1992", "model.num_query_groups=8"),
    *("model.num_moe_experts=6", "model.num_layers=32"),
)
"""A larger version of the demo's model, on 7,968 devices."""

_IMPORT = "import time; import megatron.core; print(time.time())"
_CONFIG = """
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
vocab_size = 300
[data]
train = ["data/train"]
tokenizer = "data/tokenizer.json"
seq_length = 64
[train]
train_iters = 1
global_batch_size = 2
log_interval = 1
precision = "fp32"
[checkpoint]
save_interval = 0
"""


@attrs.frozen
class Command:
    """A command that writes nothing, and its time limit."""

    name: str
    words: tuple[str, ...]
    limit: float
    """Unit: seconds."""
    repeats: int | None = None
    """Number of runs; None: that of the settings."""
    packages: int = 0
    """Further packages with a plugin that are installed."""


COMMANDS: Final = (
    Command("ascend-run --help", ("--help",), LIMIT_COMMAND_SECONDS),
    Command("ascend-run plugins", ("plugins",), LIMIT_COMMAND_SECONDS),
    Command(
        "ascend-run plugins, 100 more installed", ("plugins",), LIMIT_COMMAND_SECONDS, packages=100
    ),
    Command("plan of the demo", ("plan", *DEMO), LIMIT_PLAN_SECONDS),
    Command("plan of 7968 devices", ("plan", *LARGE), LIMIT_LARGE_PLAN_SECONDS),
    Command(
        "verify --enable ulysses cp=2",
        ("verify", "--enable", "ulysses", "cp=2"),
        LIMIT_VERIFY_SECONDS,
        repeats=3,
    ),
)


def benchmarks() -> list[Benchmark]:
    """One row per command that writes nothing, and one for the start of a training run."""
    commands = [
        Benchmark(
            name=command.name,
            goal=f"<= {command.limit:g} s",
            measure=functools.partial(_measure_command, command),
        )
        for command in COMMANDS
    ]
    first_step = Benchmark(
        name=FIRST_STEP_ROW,
        goal=f">= {1 / LIMIT_FIRST_STEP:.3g} x",
        measure=_measure_first_step,
    )
    return [*commands, first_step]


def _measure_command(command: Command, settings: Settings) -> Row:
    settings.report(command.name)
    with tempfile.TemporaryDirectory() as site:
        write_packages(Path(site), command.packages)
        measure = functools.partial(
            wall_seconds, [ASCEND_RUN, *command.words], variables={"PYTHONPATH": site}
        )
        measure()  # once, for the disk cache and the compiled modules
        seconds = [measure() for _ in range(command.repeats or settings.repeats)]
    notes = [f"median of {len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f} s"]
    if command.words == ("--help",):
        notes.append(_peer_help(settings))
    return bounded(
        name=command.name,
        value=statistics.median(seconds),
        unit="s",
        limit=command.limit,
        note="; ".join(notes),
        device=device(),
    )


def _peer_help(settings: Settings) -> str:
    """Time of `--help` of other systems, for information."""
    found = []
    for command in ("litgpt", "torchrun"):
        path = settings.peers_python.with_name(command)
        settings.report(f"{command} --help")
        try:
            runs = range(min(PEER_RUNS, settings.repeats))
            seconds = statistics.median(wall_seconds([path, "--help"]) for _ in runs)
        except NotMeasured as reason:
            found.append(f"{command} --help not measured ({reason})")
        else:
            found.append(f"{command} --help {seconds:.2f} s")
    return ", ".join(found)


def _measure_first_step(settings: Settings) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(_CONFIG)
        make_tiny_data(folder, [ASCEND_RUN])
        first_step_seconds(folder)  # warms up the disk cache for both
        ours, peer = alternating(
            settings, lambda: first_step_seconds(folder), import_seconds, FIRST_STEP_ROW
        )
    return compared(
        name=FIRST_STEP_ROW,
        ours=ours,
        peer=peer,
        unit="s",
        goal=1 / LIMIT_FIRST_STEP,
        note=f"asked: at most {LIMIT_FIRST_STEP:g} x the time of the import",
        device=device(),
        larger_is_better=False,
    )


def first_step_seconds(folder: Path) -> float:
    """Return the time from starting the command to the first step in ``metrics.jsonl``."""
    output = folder / "run"
    begin = time.time()
    run([ASCEND_RUN, "--config", "run.toml", f"run.output_dir={output}"], folder)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    times = [r["time"] for r in map(json.loads, lines) if r.get("step") == 1 and "loss" in r]
    return float(times[-1]) - begin


def import_seconds() -> float:
    """Return the time from starting Python to the end of ``import megatron.core``."""
    begin = time.time()
    return float(run([sys.executable, "-c", _IMPORT]).stdout.split()[-1]) - begin
