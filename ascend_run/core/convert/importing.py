"""Filling this rank's parameters from a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ModelFamily, ShardPiece
from ascend_run.plugin_api.errors import CheckpointError

from .parameter_rows import (
    VOCABULARY_PARAMETERS,
    ParameterSource,
    RowRun,
    parameter_sources,
    row_runs,
    stored_shapes,
    tied_copy,
)
from .stored_tensors import StoredTensors

_COMPUTED: Final = r".*\.rotary_emb\.inv_freq"
"""Buffers that old checkpoints of any family hold and every reader computes anew."""
_ROWS_AT_A_TIME: Final = 4096

Progress = Callable[[str, int, int], None]
"""Told how far a stage has come: its name, bytes done, bytes in all."""


def load_hf_weights(
    folder: str | Path, family: ModelFamily, config: RunConfig, pieces: Sequence[ShardPiece]
) -> None:
    """Fill ``pieces`` in place; only their own slices are read, one after the other.

    Args:
        pieces: This rank's parts. A key is the parameter's name in Megatron's GPTModel
            (``decoder.layers.0.mlp.linear_fc1.weight``, layers counted over the whole model); the
            global shape and the offset are those of the whole parameter without parallelism, with
            vocabulary padding. A part that is no box there is given as several: with tensor
            parallelism a gated fc1 is its gate rows and its up rows. Padding rows become 0.

    Raises:
        CheckpointError: The folder cannot be read; a tensor is missing, unexpected, of another
            shape or no floating point; a piece has no counterpart. All of them in one message,
            and nothing is filled before all are known to be absent.
    """
    with StoredTensors(folder) as stored:
        sources, problems = _match(stored, family, config)
        runs = {} if problems else _plan(stored, sources, config, pieces, problems)
        if problems:
            raise CheckpointError(f"{folder} does not fit this {family.model_type} model", problems)
        for piece in pieces:
            _fill(piece, runs[piece.key], stored)


def read_hf_model(
    folder: str | Path,
    family: ModelFamily,
    config: RunConfig,
    progress: Progress = lambda stage, done, total: None,
) -> list[ShardPiece]:
    """The whole model as new tensors, one piece a parameter, in the stored dtypes.

    The vocabulary is not padded.

    Args:
        progress: Told of the bytes that were read.

    Raises:
        CheckpointError: As ``load_hf_weights`` does.
    """
    with StoredTensors(folder) as stored:
        sources, problems = _match(stored, family, config)
        pieces = [] if problems else [_whole(source, stored) for source in sources.values()]
        runs = {} if problems else _plan(stored, sources, config, pieces, problems)
        if problems:
            raise CheckpointError(f"{folder} does not fit this {family.model_type} model", problems)
        done, total = 0, sum(piece.tensor.nbytes for piece in pieces)
        for piece in pieces:
            _fill(piece, runs[piece.key], stored)
            done += piece.tensor.nbytes
            progress("read", done, total)
    return pieces


def _whole(source: ParameterSource, stored: StoredTensors) -> ShardPiece:
    """Room for a parameter, as large as the stored tensors that it is put together from."""
    parts = [stored.shape(name) for name in source.hf[0]]
    parts = [shape[::-1] for shape in parts] if source.transposed else parts
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    if source.form == "stack_experts":
        shape = (len(source.hf), *shape)
    tensor = torch.empty(shape, dtype=stored.dtype(source.hf[0][0]))
    return ShardPiece(key=source.name, tensor=tensor, global_shape=shape, offset=(0,) * len(shape))


def _match(
    stored: StoredTensors, family: ModelFamily, config: RunConfig
) -> tuple[Mapping[str, ParameterSource], list[str]]:
    """The whole model's parameters, and which stored names are missing or too many."""
    for field in ("num_layers", "num_moe_experts"):  # before as many names are made up
        count = config.model.get(field) or 0
        if count > len(stored.names):
            stored_count = f"only {len(stored.names)} tensors are stored"
            return {}, [f"model.{field} is {count}, but {stored_count}"]
    output, embedding = tied_copy(family)
    stored.complete_names(family.base_prefix, but=output)
    sources = parameter_sources(family, config)
    expected = {name for source in sources.values() for name in source.hf_names}
    problems = [f"{name} is missing" for name in sorted(expected - stored.names)]
    buffers = re.compile("|".join((_COMPUTED, *family.buffers)))
    extra = {name for name in stored.names - expected if not buffers.fullmatch(name)}
    if output in extra and embedding in stored.names:  # so it is not expected: tied
        extra.remove(output)
        if not _equal(stored, output, embedding):
            problems.append(
                f"{output} differs from {embedding}, though the model ties them; set "
                "tie_word_embeddings to false in config.json"
            )
    problems += [f"{name} is unexpected: no parameter takes it" for name in sorted(extra)]
    return sources, problems + stored.unreadable(expected & stored.names)


def _plan(
    stored: StoredTensors,
    sources: Mapping[str, ParameterSource],
    config: RunConfig,
    pieces: Sequence[ShardPiece],
    problems: list[str],
) -> dict[str, tuple[RowRun, ...]]:
    """The runs of every parameter that has a piece here; adds to ``problems`` what does not
    fit."""
    plan: dict[str, tuple[RowRun, ...]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for piece in pieces:
        assert (piece.key, piece.offset) not in seen, f"{piece.key} at {piece.offset} twice"
        seen.add((piece.key, piece.offset))
        if piece.key in plan:
            continue
        plan[piece.key] = ()
        if (source := sources.get(piece.key)) is None:
            problems.append(f"parameter {piece.key} has no Hugging Face tensor")
            continue
        try:
            runs = row_runs(source, piece.global_shape, config)
        except ValueError as problem:
            problems.append(f"parameter {piece.key}: {problem}")
            continue
        plan[piece.key] = runs
        for name, shape in stored_shapes(runs, piece.global_shape).items():
            if stored.shape(name) != shape:
                problems.append(f"{name} is {list(stored.shape(name))}, expected {list(shape)}")
    return plan


@torch.no_grad()
def _fill(piece: ShardPiece, runs: Sequence[RowRun], stored: StoredTensors) -> None:
    stacked = runs[0].expert is not None
    first = piece.offset[0] if stacked else 0
    matrices = piece.tensor if stacked else piece.tensor.unsqueeze(0)
    row, *column = piece.offset[1:] if stacked else piece.offset
    columns = slice(column[0], column[0] + matrices.shape[2]) if column else None
    if piece.key in VOCABULARY_PARAMETERS:
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
            shift = run.hf_start - run.start
            target[begin - row : end - row].copy_(
                stored.rows(run.hf, begin + shift, end + shift, columns, transposed=run.transposed)
            )
        filled += max(0, stop - start)
    whole = sum(len(matrix) for matrix in matrices)
    assert filled == whole or piece.key in VOCABULARY_PARAMETERS, f"{piece.key}: {filled}/{whole}"


def _equal(stored: StoredTensors, one: str, other: str) -> bool:
    """Bit for bit, a part at a time."""
    shape = stored.shape(one)
    if shape != stored.shape(other) or len(shape) != 2:
        return False

    def part(name: str, begin: int) -> Tensor:
        return stored.rows(name, begin, min(begin + _ROWS_AT_A_TIME, shape[0]))

    return all(
        torch.equal(part(one, begin), part(other, begin))
        for begin in range(0, shape[0], _ROWS_AT_A_TIME)
    )
