"""Runs of a task on a folder with a tiny Llama, its tokenizer and files of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from .tiny_llama import OPTIMIZER

STEPS, BATCH = 10, 4
Sample = TypeVar("Sample")
Layout = tuple[int, dict[str, Any], tuple[str, ...]]
"""Number of ranks, changes of a run's values, and plugins."""

TP, PP = "parallel__tensor_model_parallel_size", "parallel__pipeline_model_parallel_size"
CP = "parallel__context_parallel_size"
LAYOUTS: Final[Mapping[str, Layout]] = {
    "one": (1, {}, ()),
    "one, all at once": (1, {"train__micro_batch_size": 4}, ()),
    "dp=2": (2, {"train__micro_batch_size": 2}, ()),
    "dp=2, distributed optimizer": (2, {"ddp__use_distributed_optimizer": True}, ()),
    "tp=2": (2, {TP: 2}, ()),
    "tp=2, sp": (2, {TP: 2, "parallel__sequence_parallel": True, "train__micro_batch_size": 2}, ()),
    "pp=2": (2, {PP: 2}, ()),
    "pp=2, two rows": (2, {PP: 2, "train__micro_batch_size": 2}, ()),
    "pp=2, tied": (2, {PP: 2, "model": "tied"}, ()),
    "pp=2, vpp=2": (
        2,
        {PP: 2, "parallel__virtual_pipeline_model_parallel_size": 2, "model": "deep"},
        (),
    ),
    "tp=2, pp=2, sp": (4, {TP: 2, PP: 2, "parallel__sequence_parallel": True}, ()),
    "cp=2, ulysses": (2, {CP: 2}, ("ulysses",)),
    "cp=2, ring": (2, {CP: 2, "train__micro_batch_size": 2}, ("ring-attention",)),
}


def layouts_without(*names: str) -> dict[str, Layout]:
    """Return the layouts but those named."""
    assert {*names} <= LAYOUTS.keys()
    return {name: layout for name, layout in LAYOUTS.items() if name not in names}


def run_values(
    task: str, folder: Path, output: Path, *, model: str = "model", **changes: Any
) -> dict[str, Any]:
    """Return config values of a run in float32 with the optimizer of ``tiny_llama``.

    Args:
        folder: Contains ``tokenizer``, ``train.jsonl`` and the model.
        model: Name of the model's folder in it.
        changes: Further values; a key has ``__`` for each dot.
    """
    return {
        **OPTIMIZER,
        "task": task,
        "run.output_dir": str(output),
        "model.family": "llama",
        "model.hf_path": str(folder / model),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
        "train.train_iters": STEPS,
        "train.global_batch_size": BATCH,
        "train.precision": "fp32",
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def ten_steps(task: str, folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return the same of a run that logs every step, reads records in the order of their file, and
    does not pack them.

    Args:
        folder: Contains ``held-out.jsonl`` too.
        changes: As of ``run_values``.
    """
    of_steps = {
        "data__validation": [str(folder / "held-out.jsonl")],
        "data__seq_length": 128,
        "train__log_interval": 1,
        f"plugins__{task}__shuffle": False,
        f"plugins__{task}__packing": False,
    }
    return run_values(task, folder, output, **{**of_steps, **changes})


def held_out_in_a_step(task: str, folder: Path, *, packs: int = 0) -> dict[str, Any]:
    """Return the changes of a run whose only step takes the seven held-out records.

    Args:
        packs: Samples that they fill if they are packed; 0: they are not packed.
    """
    return {
        "data__train": [str(folder / "held-out.jsonl")],
        "train__train_iters": 1,
        "train__global_batch_size": packs or 7,
        "train__micro_batch_size": packs or 1,
        f"plugins__{task}__packing": packs > 0,
    }


EVALUATED: Final[Mapping[str, Any]] = {
    "train__eval_interval": 5,
    "train__eval_iters": 1,
    "train__global_batch_size": 7,
    "train__train_iters": 5,
    "optimizer__lr": 0.0,
}
"""Changes of a run that evaluates the seven held-out records twice, and does not learn."""


def batches_of(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Return the global batches of the steps of a run that does not shuffle."""
    return [samples[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
