"""Fill this rank's parameters from a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.contracts import ModelFamily, TensorShard
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.types.config import RunConfig

from .parameter_rows import (
    SCORE,
    VOCABULARY_PARAMETERS,
    ParameterSource,
    RowRun,
    later_layers,
    mtp_copies,
    num_stored_depths,
    output_names,
    parameter_sources,
    row_runs,
    stored_shapes,
    tied_copy,
)
from .stored_tensors import StoredTensors

_COMPUTED: Final = r".*\.rotary_emb\.inv_freq"
"""Buffers that old checkpoints contain and all readers recompute."""
_ROWS_AT_A_TIME: Final = 4096


def load_hf_weights(
    folder: str | Path, family: ModelFamily, config: RunConfig, shards: Sequence[TensorShard]
) -> list[str]:
    """Fill ``shards`` in place; only their own slices are read, one after the other.

    Args:
        shards: This rank's shards. The key is the parameter's name in Megatron's GPTModel
            (``decoder.layers.0.mlp.linear_fc1.weight``, with global layer numbers); global shape
            and offset are those of the unsharded parameter with vocabulary padding. A shard that is
            not a box is given as several: with tensor parallelism a gated fc1 has gate rows and up
            rows. Padding rows become 0.

    Returns:
        The parameters of the model that keep their values, as the folder has an output layer where
        the model has a score head.

    Raises:
        CheckpointError: The folder cannot be read; a tensor is missing, unexpected, of another
            shape or not floating point; or a shard has no counterpart. Lists all problems; nothing
            is filled then.
    """
    with matched_weights(folder, family, config, shards) as (fill, lacking):
        for shard in shards:
            fill(shard)
    return lacking


@contextmanager
def matched_weights(
    folder: str | Path, family: ModelFamily, config: RunConfig, shards: Sequence[TensorShard]
) -> Iterator[tuple[Callable[[TensorShard], None], list[str]]]:
    """Check what ``load_hf_weights`` checks; give a function that fills one shard, and what that
    returns."""
    with StoredTensors(folder) as stored:
        sources = matched_sources(stored, family, config, begins_scores=True)
        lacking = [SCORE] if SCORE in sources and SCORE not in stored.names else []
        shards = [shard for shard in shards if shard.key not in lacking]
        runs = runs_of_shards(shards, sources, stored, family, config)

        def fill(shard: TensorShard) -> None:
            if shard.key not in lacking:
                _fill(shard, runs[shard.key], stored)

        yield fill, lacking


def matched_sources(
    stored: StoredTensors, family: ModelFamily, config: RunConfig, *, begins_scores: bool = False
) -> Mapping[str, ParameterSource]:
    """Return the full model's parameters, each with the stored tensors it is built from.

    Args:
        begins_scores: Whether a folder with an output layer in place of a score head is taken too.

    Raises:
        CheckpointError: Lists the names that are missing, unexpected or unreadable.
    """
    one_by_one = any("{expert}" in name for tensor in family.tensors for name in tensor.hf)
    # Checked before generating that many names.
    for field in ("num_layers", *(["num_moe_experts"] if one_by_one else [])):
        count = config.model[field] or 0
        if count > len(stored.names):
            stored_count = f"only {len(stored.names)} tensors are stored"
            raise _mismatch(stored, family, [f"model.{field} is {count}, but {stored_count}"])
    output, embedding = tied_copy(family)
    stored.complete_names(family.base_prefix, but=output)
    sources = parameter_sources(family, config)
    expected = {name for source in sources.values() for name in source.hf_names}
    problems = [f"{name} is missing" for name in sorted(expected - stored.names)]
    buffers = re.compile("|".join((_COMPUTED, *family.buffers)))
    extra = {name for name in stored.names - expected if not buffers.fullmatch(name)}
    extra -= {name for name in extra if 0 in stored.shape(name)}  # of no shared experts
    if begins_scores and SCORE in expected - stored.names:
        problems.remove(f"{SCORE} is missing")
        expected.remove(SCORE)
        extra -= output_names(family)
    if depths := num_stored_depths(stored.names, family, config):
        if config.model.mtp_num_layers is None:
            problems.append(
                f"{depths} layers of multi-token prediction are stored; set "
                f"model.mtp_num_layers={depths} to train them, or 0 to leave them out"
            )
        if not config.model.mtp_num_layers:
            extra -= later_layers(extra, family, config)
    if output in extra and embedding in stored.names:  # not expected because it is tied
        extra.remove(output)
        if not _equal(stored, output, embedding):
            problems.append(
                f"{output} differs from {embedding}, though the model ties them; set "
                "tie_word_embeddings to false in config.json"
            )
    for name, original in mtp_copies(family, config).items():
        if name in extra and original in stored.names:
            extra.remove(name)
            if not _equal(stored, name, original):
                problems.append(f"{name} differs from {original}, which the model shares")
    problems += [f"{name} is unexpected: no parameter takes it" for name in sorted(extra)]
    if problems := [*problems, *stored.unreadable(expected & stored.names)]:
        raise _mismatch(stored, family, problems)
    return sources


def runs_of_shards(
    shards: Sequence[TensorShard],
    sources: Mapping[str, ParameterSource],
    stored: StoredTensors,
    family: ModelFamily,
    config: RunConfig,
) -> dict[str, tuple[RowRun, ...]]:
    """Return the runs of every parameter that has a shard here.

    Raises:
        CheckpointError: Lists parameters without a source, and tensors of another shape.
    """
    plan: dict[str, tuple[RowRun, ...]] = {}
    problems: list[str] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for shard in shards:
        assert (shard.key, shard.offset) not in seen, f"{shard.key} at {shard.offset} twice"
        seen.add((shard.key, shard.offset))
        if shard.key in plan:
            continue
        plan[shard.key] = ()
        if (source := sources.get(shard.key)) is None:
            problems.append(f"parameter {shard.key} has no Hugging Face tensor")
            continue
        try:
            runs = row_runs(source, shard.global_shape, config)
        except ValueError as problem:
            problems.append(f"parameter {shard.key}: {problem}")
            continue
        plan[shard.key] = runs
        for name, shape in stored_shapes(runs, shard.global_shape).items():
            if stored.shape(name) != shape:
                problems.append(f"{name} is {list(stored.shape(name))}, expected {list(shape)}")
    if problems:
        raise _mismatch(stored, family, problems)
    return plan


def _mismatch(stored: StoredTensors, family: ModelFamily, problems: list[str]) -> CheckpointError:
    headline = f"{stored.folder} does not match this {family.model_type} model"
    return CheckpointError(headline, problems)


@torch.no_grad()
def _fill(shard: TensorShard, runs: Sequence[RowRun], stored: StoredTensors) -> None:
    stacked = runs[0].expert is not None
    first = shard.offset[0] if stacked else 0
    matrices = shard.tensor if stacked else shard.tensor.unsqueeze(0)
    row, *column = shard.offset[1:] if stacked else shard.offset
    columns = slice(column[0], column[0] + matrices.shape[2]) if column else None
    if shard.key in VOCABULARY_PARAMETERS:
        matrices.zero_()
    filled = 0
    for run in runs:
        index = (run.expert or 0) - first
        if not 0 <= index < len(matrices):
            continue
        target = matrices[index]
        start, stop = max(run.start, row), min(run.start + run.rows, row + len(target))
        for begin in range(start, stop, _ROWS_AT_A_TIME):
            end = min(begin + _ROWS_AT_A_TIME, stop)
            target[begin - row : end - row].copy_(read_rows(stored, run, begin, end, columns))
        filled += max(0, stop - start)
    whole = sum(len(matrix) for matrix in matrices)
    assert filled == whole or shard.key in VOCABULARY_PARAMETERS, f"{shard.key}: {filled}/{whole}"


def read_rows(
    stored: StoredTensors, run: RowRun, begin: int, end: int, columns: slice | None = None
) -> Tensor:
    """Read rows ``begin:end`` of a parameter."""
    rows = run.stored(begin, end)
    return stored.rows(run.hf, rows, columns, transposed=run.transposed, expert=run.hf_expert)


def _equal(stored: StoredTensors, one: str, other: str) -> bool:
    """Return whether two stored tensors are bitwise equal, comparing blocks of rows."""
    shape = stored.shape(one)
    if shape != stored.shape(other) or len(shape) != 2:
        return False

    def part(name: str, begin: int) -> Tensor:
        return stored.rows(name, slice(begin, min(begin + _ROWS_AT_A_TIME, shape[0])))

    return all(
        torch.equal(part(one, begin), part(other, begin))
        for begin in range(0, shape[0], _ROWS_AT_A_TIME)
    )
