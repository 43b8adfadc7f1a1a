"""Fine-tuning an adapter by ``sft`` and ``dpo``: a real run against trl and peft."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import statistics
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import attrs

from . import llama
from .data_preparation import ASCEND_RUN
from .end_to_end import largest_difference
from .protocol import Benchmark, NotMeasured, Settings, alternating, device, run, worker
from .rows import Row, compared, failed
from .tuning_data import ALPHA, RANK
from .tuning_worker import METRICS

GOAL: Final = 1.3
TOLERANCE: Final = {"fp32": 1e-4, "bf16": 1e-2}
"""Maximum relative difference of any metric of any step. In bf16, the two round
activations at different operations."""
STEPS: Final = 2
"""Timed ones, of which each is all records; more, and the rows would take too long."""


@attrs.frozen(kw_only=True)
class Case:
    """A task, and how trl groups its records."""

    task: str
    grouping: str
    unit: str
    aim: str = "aim 2 x"

    def name(self, dtype: str) -> str:
        return f"{self.task} with LoRA, 17M Llama {dtype} vs trl, {self.grouping}"


CASES: Final = (
    Case(task="sft", grouping="packed", unit="conversations/s"),
    Case(task="sft", grouping="padded", unit="conversations/s"),
    Case(task="dpo", grouping="padded", unit="pairs/s"),
)


class Folder:
    """What all rows train on, written when the first one is measured and removed with the last."""

    @cached_property
    def path(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix="ascend-run-tuning-"))
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return made

    @cached_property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the records of each task; see ``tuning_data.write_records``."""
        return worker("tuning_data", self.path)


def benchmarks() -> list[Benchmark]:
    """One row per precision, task and grouping; there is no packing in trl's ``dpo``."""
    folder = Folder()
    return [
        Benchmark(
            name=case.name(dtype),
            goal=f">= {GOAL:g} x",
            measure=functools.partial(_measure, case, dtype, folder),
        )
        for dtype, case in itertools.product(("bf16", "fp32"), CASES)
    ]


def _measure(case: Case, dtype: str, folder: Folder, settings: Settings) -> Row:
    name = case.name(dtype)
    settings.report(f"{name}: records and model")
    sizes = folder.sizes[case.task]
    steps = settings.warmup + min(settings.steps, STEPS)
    ours, theirs = alternating(
        settings,
        lambda: our_run(case.task, dtype, folder.path, sizes["samples"], steps),
        lambda: worker(
            "tuning_worker", folder.path, folder.path / "trl", "--task", case.task,
            "--grouping", case.grouping, "--dtype", dtype, "--steps", str(steps),
        ),
        name,
    )  # fmt: skip
    difference = differences(ours[0], theirs[0])
    row = compared(
        name=name,
        ours=[speed(one, sizes["records"], settings.warmup) for one in ours],
        peer=[speed(one, sizes["records"], settings.warmup) for one in theirs],
        unit=case.unit,
        goal=GOAL,
        note=f"every metric of {steps} steps within {difference:.1e}; {described(sizes)}; "
        f"{case.aim}",
        device=device(),
    )
    if not difference <= TOLERANCE[dtype]:  # also true for NaN
        return failed(row, f"not the same training: {shown(ours[0])} against {shown(theirs[0])}")
    return row


def our_run(task: str, dtype: str, folder: Path, samples: int, steps: int) -> dict[str, Any]:
    """Run the command, and return the seconds and the metrics of every step.

    Args:
        samples: Packed samples that hold all records.
    """
    from ascend_run.core.log.metrics import read_metrics

    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    run([*ASCEND_RUN, "--task", task, "--enable", "lora", "--platform", "cpu",
         *overrides(task, dtype, folder, samples, steps), f"run.output_dir={output}"])  # fmt: skip
    records = read_metrics(output / "metrics.jsonl").records
    if len(records) != steps:
        raise NotMeasured(f"{len(records)} steps in {output / 'metrics.jsonl'}, not {steps}")
    return {
        "seconds": [one["step_seconds"] for one in records],
        **{name: [one[name] for one in records if name in one] for name in METRICS},
    }


def overrides(task: str, dtype: str, folder: Path, samples: int, steps: int) -> list[str]:
    """Return the config of our run, but for its output."""
    length = json.loads((folder / "model/config.json").read_text())["max_position_embeddings"]
    reference = {"dpo": ["plugins.dpo.reference=base", "plugins.dpo.beta=0.1"]}
    return [
        "model.family=llama",
        f"model.hf_path={folder / 'model'}",
        f"data.train={folder / task}.jsonl",
        f"data.tokenizer={folder / 'model'}",
        f"data.seq_length={length}",
        f"train.train_iters={steps}",
        "train.micro_batch_size=1",
        f"train.global_batch_size={samples}",
        f"train.precision={dtype}",
        "train.log_interval=1",
        f"optimizer.lr={llama.LEARNING_RATE}",
        "optimizer.lr_decay_style=constant",
        "optimizer.weight_decay=0.0",
        "checkpoint.save_interval=0",
        f"plugins.lora.rank={RANK}",
        f"plugins.lora.alpha={ALPHA}",
        f"plugins.lora.load={folder / 'adapter'}",
        f"plugins.{task}.packing=true",
        *reference.get(task, []),
    ]


def speed(result: Mapping[str, Any], records: int, warmup: int) -> float:
    """Return the records per second of the median step after the warm-up."""
    return records / statistics.median(result["seconds"][warmup:])


def differences(ours: Mapping[str, Sequence[float]], peer: Mapping[str, Sequence[float]]) -> float:
    """Return the maximum relative difference of any metric of any step.

    The first loss of ``dpo`` is log 2 for any model, but the log-probabilities of its answers, the
    norm of its gradient and the next losses are not.
    """
    found = [largest_difference(ours[name], peer[name]) for name in METRICS if peer[name]]
    return math.nan if any(map(math.isnan, found)) else max(found)


def described(sizes: Mapping[str, Any]) -> str:
    low, middle, high = sizes["quartiles"]
    return (
        f"a step is {sizes['records']} records, {sizes['tokens']} tokens, of which an answer with "
        f"its prompt has {middle:.0f} ({low:.0f} to {high:.0f}, at most {sizes['longest']})"
    )


def shown(result: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(
        f"{name} {', '.join(f'{value:.6g}' for value in result[name])}"
        for name in METRICS
        if result[name]
    )
