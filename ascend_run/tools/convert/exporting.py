"""Write a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import (
    EMBEDDING,
    ParameterSource,
    RowRun,
    mtp_copies,
    parameter_sources,
    row_runs,
)
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from ascend_run.types.config import RunConfig

from .new_folder import new_folder
from .safetensors_shards import SafetensorsShards
from .write_queue import write_queue

MAX_SHARD_BYTES: Final = 5 * 10**9
"""Maximum file size, the default of transformers."""
_BESIDE: Final = (
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.*",
)
"""Files of a Hugging Face folder that do not depend on its weights: the tokenizer's, and how to
generate."""


def export_hf(
    folder: str | Path,
    family: ModelFamily,
    config: RunConfig,
    state: Iterable[tuple[str, Tensor]],
    *,
    files: Sequence[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and safetensors for transformers, with one parameter in memory at a time.

    They are written to a temporary folder, which is then renamed.

    Args:
        folder: Must not exist, or be empty.
        files: Copied to the folder; see ``files_beside``.
        state: (name in Megatron's GPTModel, full tensor), each parameter once, in any order;
            vocabulary padding is dropped.

    Raises:
        ConfigError: The family's Hugging Face class does not support this model's config.
        CheckpointError: A parameter is missing, unknown, or of the wrong shape.
        StorageError: The folder is not empty or cannot be written.
    """
    config_json = config_to_hf(family, config) | _score_keys(family, config)
    with new_folder(Path(folder), 0o755) as beside:
        dtype = _write_tensors(beside, family, config, state, max_shard_bytes)
        config_json["dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(config_json, indent=2, sort_keys=True) + "\n"
        (beside / "config.json").write_text(text, "utf-8")
        for file in files:
            shutil.copyfile(file, beside / file.name)


def files_beside(folder: Path | None) -> list[Path]:
    """Return the files of a tokenizer and of generation in a Hugging Face folder, if there is
    one."""
    if folder is None:
        return []
    found = {file for pattern in _BESIDE for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


def _score_keys(family: ModelFamily, config: RunConfig) -> dict[str, object]:
    """Return what names the class of a model with a score head, and its labels."""
    if not (count := config.model.num_labels):
        return {}
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    numbers = {name: int(number) for number, name in names.items()}
    return {"architectures": [family.classifier], "id2label": names, "label2id": numbers}


def hf_tensors(
    source: ParameterSource, parameter: Tensor, config: RunConfig
) -> Iterator[tuple[str, Tensor]]:
    """Split one full parameter into its Hugging Face tensors, by name.

    Raises:
        ValueError: The parameter's shape does not match the family and config.
    """
    parts: dict[str, list[RowRun]] = {}
    for run in row_runs(source, parameter.shape, config):
        parts.setdefault(run.hf, []).append(run)
    for name, runs in parts.items():
        if runs[0].hf_expert is not None:
            yield name, _stacked(runs, parameter)
            continue
        in_order = sorted(runs, key=lambda run: run.hf_start)
        rows = [_rows(parameter, run) for run in in_order]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        yield name, whole.t() if runs[0].transposed else whole


def _stacked(runs: list[RowRun], parameter: Tensor) -> Tensor:
    """Return the stored tensor that stacks all experts."""
    stored = torch.empty_like(parameter)
    for run in runs:
        assert run.hf_expert is not None
        where = run.stored(run.start, run.start + run.rows)
        stored[run.hf_expert][where] = _rows(parameter, run)
    return stored.transpose(1, 2) if runs[0].transposed else stored


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
    """Write all parameters; return the dtype of the embedding, for config.json."""
    missing: dict[str, ParameterSource] = dict(parameter_sources(family, config))
    copies = mtp_copies(family, config)
    names = [name for source in missing.values() for name in source.hf_names]
    names += copies
    shards = SafetensorsShards(folder, names, max_shard_bytes)
    problems: list[str] = []
    dtype = torch.float32
    try:
        with write_queue() as writes:
            for name, parameter in state:
                if (source := missing.pop(name, None)) is None:
                    problems.append(f"parameter {name} does not exist in a {family.architecture}")
                    continue
                if name == EMBEDDING:
                    dtype = parameter.dtype
                try:
                    for hf_name, tensor in hf_tensors(source, parameter, config):
                        written = tensor.detach().cpu().contiguous()
                        for each in (hf_name, *(k for k, old in copies.items() if old == hf_name)):
                            writes.submit(shards.add, each, written)
                except ValueError as problem:
                    problems.append(f"parameter {name}: {problem}")
        problems += [f"parameter {name} is missing" for name in missing]
        if problems:
            raise CheckpointError("this model cannot be exported", problems)
        shards.close()
    finally:
        shards.abandon()
    return dtype
