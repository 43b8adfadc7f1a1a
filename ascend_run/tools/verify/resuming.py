"""Run in one piece, and stop and resume the same run. Imports no torch by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.tools.verify.compare.thresholds import STEPS, STOP
from ascend_run.types.config import RunConfig

from .questions import KIT_DATASET, Side
from .ranks import Fault, Ranks, temporary_folder

if TYPE_CHECKING:
    from ascend_run.tools.verify.compare.resuming import ResumedRun

_LOSS_SCALE_WINDOW: Final = 3
"""In fp16 the loss scale grows after the stop, by steps before it."""
_EPOCHS: Final = (0.35, 0.2)
"""Samples of each built-in dataset, as a share of those that the run reads: later epochs begin."""
_FIXED: Final[Mapping[str, object]] = {
    "train.train_iters": STEPS + STOP,  # the runs are interrupted earlier
    "train.eval_interval": 0,
    "train.log_interval": 1,
    "checkpoint.save": None,
    "checkpoint.resume": True,
}


def stop_and_resume(
    ranks: Ranks, side: Side, fault: Fault = None, report: Callable[[str], None] = lambda name: None
) -> ResumedRun:
    """Execute a run without a stop, and the same run in two parts.

    Args:
        side: The candidate, with dropout and in the precision that it trains in.
        fault: Fault to plant in all of them.
        report: Called with the name of each run.

    Raises:
        AscendRunError: One of the runs cannot start, or failed.
    """
    from ascend_run.tools.verify.compare.resuming import ResumedRun

    with temporary_folder() as folder:
        fixed = {**side.values, **_FIXED, **_settings(side, folder)}

        def train(name: str, run: str, until: int, *, save: int = STOP, new: bool = False) -> Any:
            values = {"run.output_dir": str(folder / run), "checkpoint.save_interval": save}
            named = attrs.evolve(side, name=f"{side.name}, {name}", values={**fixed, **values})
            report(named.name)
            return ranks.train(named, until, fault, new=new)

        return ResumedRun(
            whole=train(f"{STEPS} steps", "whole", STEPS, save=0),
            stopped=train(f"{STOP} steps and a checkpoint", "stopped", STOP),
            # What a plugin has left in the process must not be there after the stop.
            resumed=train("resumed", "stopped", STEPS, new=True),
        )


def _settings(side: Side, folder: Path) -> dict[str, object]:
    """Return settings that depend on the run; write the data of the built-in model."""
    config = side.prepare().config
    settings: dict[str, object] = {}
    if config.train.precision == "fp16":
        settings["optimizer.loss_scale_window"] = _LOSS_SCALE_WINDOW
    if side.uses_kit_batches and [*config.data.train] == [KIT_DATASET]:
        settings |= _token_files(config, folder)
    return settings


def _token_files(config: RunConfig, folder: Path) -> dict[str, object]:
    """Write two datasets of random tokens; return the settings that blend them."""
    draws = random.Random(3)
    vocab_size, length = config.model.vocab_size, config.data.seq_length
    num_samples = STEPS * config.train.global_batch_size
    prefixes = [str(folder / f"tokens-{index}") for index in range(len(_EPOCHS))]
    for prefix, share in zip(prefixes, _EPOCHS, strict=True):
        left = length * max(1, round(share * num_samples)) + 1
        with bin_path(prefix).open("wb") as stream:
            writer = IndexedWriter(stream, dtype_for(vocab_size))
            while left > 0:
                size = min(left, draws.randint(1, 2 * length))
                writer.add([draws.randrange(vocab_size) for _ in range(size)])
                left -= size
        idx_path(prefix).write_bytes(writer.index())
    return {"data.train": prefixes, "data.train_weights": [0.6, 0.4]}
