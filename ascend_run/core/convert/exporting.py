"""Writing a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.plugin_api.errors import CheckpointError, StorageError

from .config_keys import config_to_hf
from .parameter_rows import EMBEDDING, ParameterSource, RowRun, parameter_sources, row_runs
from .safetensors_shards import SafetensorsShards

MAX_SHARD_BYTES: Final = 5 * 10**9
"""Size of one file, as transformers chooses it."""


def export_hf(
    folder: str | Path,
    family: ModelFamily,
    config: RunConfig,
    state: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and safetensors that transformers loads; one parameter is held at a time.

    Written beside the folder and renamed when whole. Tokenizer files are the caller's to add.

    Args:
        folder: Must not exist, or be empty.
        state: (name in Megatron's GPTModel, whole tensor), each parameter once, in any order;
            vocabulary padding is dropped.

    Raises:
        ConfigError: The family's Hugging Face class cannot have this model's config.
        CheckpointError: A parameter is missing, unknown, or of the wrong shape.
        StorageError: The folder is not empty, or the file system refuses.
    """
    config_json = config_to_hf(family, config)
    out = Path(folder)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise StorageError(f"{out} is not empty; name a new folder to export to")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            dtype = _write_tensors(beside, family, config, state, max_shard_bytes)
            config_json["dtype"] = str(dtype).removeprefix("torch.")
            text = json.dumps(config_json, indent=2, sort_keys=True) + "\n"
            (beside / "config.json").write_text(text, "utf-8")
            beside.chmod(0o755)  # mkdtemp lets nobody else in
            beside.replace(out)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise StorageError(f"{out} cannot be written: {problem.strerror or problem}") from None


def hf_tensors(
    source: ParameterSource, parameter: Tensor, config: RunConfig
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors that one whole parameter holds, by name.

    Raises:
        ValueError: The parameter's shape is not the one that the family and config give it.
    """
    parts: dict[str, list[RowRun]] = {}
    for run in row_runs(source, parameter.shape, config):
        parts.setdefault(run.hf, []).append(run)
    for name, runs in parts.items():
        in_order = sorted(runs, key=lambda run: run.hf_start)
        rows = [_rows(parameter, run) for run in in_order]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        yield name, whole.t() if runs[0].transposed else whole


def _rows(parameter: Tensor, run: RowRun) -> Tensor:
    matrix = parameter if run.expert is None else parameter[run.expert]
    return matrix[run.start : run.start + run.rows]


def _write_tensors(
    folder: Path,
    family: ModelFamily,
    config: RunConfig,
    state: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> torch.dtype:
    """Write every parameter; the dtype of the embedding, which config.json names."""
    missing: dict[str, ParameterSource] = dict(parameter_sources(family, config))
    names = [name for source in missing.values() for name in source.hf_names]
    shards = SafetensorsShards(folder, names, max_shard_bytes)
    problems: list[str] = []
    dtype = torch.float32
    try:
        for name, parameter in state:
            if (source := missing.pop(name, None)) is None:
                problems.append(f"parameter {name} has no place in a {family.architecture}")
                continue
            if name == EMBEDDING:
                dtype = parameter.dtype
            try:
                for hf_name, tensor in hf_tensors(source, parameter, config):
                    shards.add(hf_name, tensor)
            except ValueError as problem:
                problems.append(f"parameter {name}: {problem}")
        problems += [f"parameter {name} is missing" for name in missing]
        if problems:
            raise CheckpointError("this model cannot be exported", problems)
        shards.close()
    finally:
        shards.abandon()
    return dtype
