"""Adapters merged into a model's files by the commands, against PEFT's merge."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ascend_run.entrypoints.cli import run
from tests.support.family_checks import stored

from .peft_models import read_peft


def convert(*words: str | Path) -> int:
    return run(["convert", *map(str, words)])


def merged_by_peft(base: str, adapter: str | Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Tensor] = read_peft(base, adapter).merge_and_unload().state_dict()
    return state


def merged_by_peft_exactly(base: str | Path, adapter: str | Path) -> Any:
    """Return the model that PEFT merges in float64."""
    model = read_peft(base, adapter).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


def check_merged(folder: Path, base: str, want: Mapping[str, Tensor], changed: int) -> None:
    got, before = stored(folder), stored(Path(base))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)
    assert sum(not torch.equal(got[name], before[name]) for name in got) == changed


def check_each_merge(folder: Path, base: str, want: Mapping[str, Tensor], changed: int) -> None:
    """Merge the adapter of ``run`` in a folder from its checkpoint and from its export."""
    exported = folder / "run/adapter"
    assert convert("--to", "hf", folder / "run", folder / "out") == 0
    check_merged(folder / "out", base, want, changed)
    assert convert("--to", "hf", "--adapter", exported, base, folder / "read") == 0
    check_merged(folder / "read", base, want, changed)


def written_as_exported(run: Path, target: Path) -> dict[str, Any]:
    """Write the adapter of a checkpoint in PEFT's format; return its settings.

    It is the one that the run exported, in every bit, and of the same base.
    """
    assert convert("--to", "peft", run, target) == 0
    folders = (run / "adapter", target)
    own, written = (json.loads((f / "adapter_config.json").read_text()) for f in folders)
    assert own == written
    files = [folder / "adapter_model.safetensors" for folder in folders]
    assert _metadata(files[0]) == _metadata(files[1])
    tensors, again = map(load_file, files)
    assert tensors.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    settings: dict[str, Any] = own
    return settings


def _metadata(file: Path) -> Any:
    with safe_open(file, framework="pt") as stored:
        return stored.metadata()
