"""Find and open the ``mp_rank_*`` folders of a checkpoint of Megatron or MindSpeed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from torch import Tensor

from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError

from .megatron_names import flat, is_legacy, ours
from .parameter_shards import LAYER
from .safe_pickle import Inert, load_file
from .shard_layout import DUALPIPEV, FOLDER, Rank, chunk_order, rank_pairs
from .torch_dist_index import INDEX

FILE_NAME: Final = "model_optim_rng.pt"
_FILE_NAMES: Final = (FILE_NAME, "model_rng.pt")
TRACKER: Final = "latest_checkpointed_iteration.txt"

Chunks = tuple[Mapping[str, Tensor], ...]
"""Tensors of one rank by our name, with layers numbered within the chunk, for each chunk."""


@attrs.frozen(kw_only=True)
class MpRankFiles:
    """An opened checkpoint. Tensors are mapped from the files, not in memory."""

    folder: Path
    ranks: Mapping[Rank, Chunks]
    rank_folders: Mapping[Rank, str]
    """Name of each rank's folder."""
    args: Mapping[str, Any]
    """The command line of the run; empty if it is not stored."""
    iteration: int
    legacy: bool
    version: float
    """Version of the files, which says how legacy names order queries, keys and values."""

    @property
    def tp(self) -> int:
        return 1 + max(rank.tp for rank in self.ranks)

    @property
    def pp(self) -> int:
        return 1 + max(rank.pp for rank in self.ranks)

    @property
    def ep(self) -> int:
        return 1 + max(rank.ep for rank in self.ranks)

    @property
    def chunks_per_stage(self) -> int:
        return len(next(iter(self.ranks.values())))

    @property
    def schedules_method(self) -> str | None:
        """``dualpipev`` if the args say so, or if the first stage has the final norm."""
        stated = self.args.get("schedules_method")
        if stated is not None or self.pp == 1 or self.chunks_per_stage != 2:
            return stated
        first = next(chunks for rank, chunks in self.ranks.items() if rank.pp == 0)
        return DUALPIPEV if "decoder.final_layernorm.weight" in first[1] else None


def iteration_folder(path: Path, iteration: int | None) -> Path:
    """Return the folder of the iteration that a path means.

    Args:
        path: A folder with ``mp_rank_*``, or one of iterations.
        iteration: Which one; None: the one that ``latest_checkpointed_iteration.txt`` names.

    Raises:
        CheckpointError: The iteration is missing, or the file that names it is malformed.
    """
    if _rank_folders(path) or (path / INDEX).is_file():
        named = re.fullmatch(r"iter_(\d+)", path.absolute().name)
        if iteration is not None and (named is None or int(named[1]) != iteration):
            raise CheckpointError(f"{path} is not the folder of iteration {iteration}")
        return path
    name = _tracked(path / TRACKER) if iteration is None else f"iter_{iteration:07d}"
    if not _rank_folders(path / name) and not (path / name / INDEX).is_file():
        raise CheckpointError(f"{path / name} is missing, or has neither mp_rank_* nor {INDEX}")
    return path / name


def iteration_of(state: Mapping[str, Any], folder: Path) -> int:
    """Return the iteration that a file states; 0 if it states none.

    Raises:
        CheckpointError: It is no number.
    """
    stated = state.get("iteration") or 0
    if type(stated) is not int or stated < 0:
        raise CheckpointError(f"{folder}: the iteration {show(stated)} is not a number")
    return stated


def _tracked(tracker: Path) -> str:
    """Return the name of the folder that the tracker file means."""
    try:
        text = tracker.read_text("utf-8", errors="replace").strip()[:40]
    except OSError as problem:
        raise CheckpointError(f"{tracker} cannot be read: {problem.strerror}") from None
    if text == "release":
        return text
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker}: {text!r} is neither an iteration nor 'release'")
    return f"iter_{int(text):07d}"


def open_mp_rank(folder: Path) -> MpRankFiles:
    """Open every file of a checkpoint.

    Raises:
        CheckpointError: A file is missing, truncated, or not Megatron's. Lists all problems.
    """
    problems: list[str] = []
    states: dict[tuple[int, ...], Mapping[str, Any]] = {}
    folders = _rank_folders(folder)
    for numbers, path in sorted(folders.items()):
        file = next((path / name for name in _FILE_NAMES if (path / name).is_file()), None)
        if file is None:
            problems.append(f"{path.name} has no {FILE_NAME}")
            continue
        try:
            states[numbers] = _checked(load_file(file), file)
        except CheckpointError as problem:
            problems.append(str(problem))
    if len({len(numbers) for numbers in states}) > 1:
        problems.append("some folders have another number of indices than others")
    if problems:
        raise CheckpointError(f"{folder} cannot be read", problems)
    legacy = any(is_legacy(chunk) for state in states.values() for chunk in _flat_chunks(state))
    versions = {_version(state, legacy=legacy) for state in states.values()}
    if len(versions) > 1:
        raise CheckpointError(
            f"{folder}: its files have different checkpoint_version: "
            f"{', '.join(map(str, sorted(versions)))}"
        )
    ranks = _ranks({numbers: _chunks(state) for numbers, state in states.items()})
    first = next(iter(states.values()))
    stored = first.get("args")
    files = MpRankFiles(
        folder=folder,
        ranks=ranks,
        rank_folders={
            rank: folders[numbers].name for rank, numbers in zip(ranks, states, strict=True)
        },
        args=stored.fields if isinstance(stored, Inert) else {},
        iteration=iteration_of(first, folder),
        legacy=legacy,
        version=versions.pop(),
    )
    _require_all(files)
    return files


def _rank_folders(folder: Path) -> dict[tuple[int, ...], Path]:
    """Map the indices in the names of the folders to the folders."""
    if not folder.is_dir():
        return {}
    return {
        tuple(int(index) for index in match.groups() if index is not None): path
        for path in folder.iterdir()
        if path.is_dir() and (match := FOLDER.fullmatch(path.name))
    }


def _checked(state: object, file: Path) -> Mapping[str, Any]:
    if not isinstance(state, dict) or not any(key in state for key in ("model", "model0")):
        raise CheckpointError(f"{file} has no 'model'; it is not a checkpoint of Megatron")
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or (version < 2 and version not in (0, 1)):
        raise CheckpointError(
            f"{file} has checkpoint_version {show(version)}; expected 0, 1.0, 2.0 or 3.0"
        )
    return state


def _version(state: Mapping[str, Any], *, legacy: bool) -> float:
    """Return the version of a file. As Megatron has it: 0 if a legacy file does not say."""
    return float(state.get("checkpoint_version", 0 if legacy else 3.0))


def _flat_chunks(state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    keys = ["model"] if "model" in state else []
    while f"model{len(keys)}" in state and "model" not in state:
        keys.append(f"model{len(keys)}")
    return [flat(state[key]) if isinstance(state[key], dict) else {} for key in keys]


def _chunks(state: Mapping[str, Any]) -> Chunks:
    return tuple(
        {ours(name): tensor for name, tensor in chunk.items()} for chunk in _flat_chunks(state)
    )


def _ranks(held: Mapping[tuple[int, ...], Chunks]) -> dict[Rank, Chunks]:
    """Interpret a second index: only the first pipeline stage has the embedding."""
    if len(next(iter(held))) != 2:
        return {Rank(*numbers): chunks for numbers, chunks in held.items()}
    embedding = "embedding.word_embeddings.weight"
    by_expert = all(embedding in chunks[0] for chunks in held.values())
    return {
        Rank(tp, ep=index) if by_expert else Rank(tp, pp=index): chunks
        for (tp, index), chunks in held.items()
    }


def _require_all(files: MpRankFiles) -> None:
    """Check that no rank is missing and that all ranks of a stage have the same layers."""
    tp, pp, ep = files.tp, files.pp, files.ep
    problems = []
    if files.schedules_method not in (None, DUALPIPEV):
        problems.append(
            f"its args have schedules_method {show(files.schedules_method)}; only {DUALPIPEV!r} "
            "is known"
        )
    elif files.schedules_method == DUALPIPEV and files.chunks_per_stage != 2:
        problems.append(
            f"its args have schedules_method {DUALPIPEV!r}, with model0 and model1 in each file; "
            f"there are {files.chunks_per_stage} chunks"
        )
    sizes = (
        ("tensor_model_parallel_size", tp),
        ("pipeline_model_parallel_size", pp),
        ("expert_model_parallel_size", ep),
    )
    for name, found in sizes:
        if (wanted := files.args.get(name)) not in (None, found):
            problems.append(f"its args have {name} {wanted}; the folders are of {found}")
    pairs = [rank_pairs(tp, ep, expert_tp) for expert_tp in range(1, tp + 1) if not tp % expert_tp]
    for stage in range(pp):
        present = {(rank.tp, rank.ep) for rank in files.ranks if rank.pp == stage}
        if present not in pairs:
            every = {(t, e) for t in range(tp) for e in range(ep)}
            problems += [
                f"the folder of tensor-parallel rank {t}, pipeline stage {stage}, expert-parallel "
                f"rank {e} is missing"
                for t, e in sorted(every - present)
            ]
    for stage in range(pp):
        layers = {
            tuple(tuple(sorted(_slots(chunk))) for chunk in chunks)
            for rank, chunks in files.ranks.items()
            if rank.pp == stage
        }
        if len(layers) > 1:
            problems.append(f"the files of pipeline stage {stage} have different layers")
    if len({len(chunks) for chunks in files.ranks.values()}) > 1:
        problems.append("some files have more chunks (model0, model1, ...) than others")
    if problems:
        raise CheckpointError(f"{files.folder} is incomplete", problems)


def _slots(chunk: Mapping[str, Tensor]) -> set[int]:
    return {int(match[1]) for name in chunk if (match := LAYER.fullmatch(name))}


def chunk_slots(files: MpRankFiles) -> list[tuple[int, int, list[int]]]:
    """Return (stage, chunk, slots that have a layer) in model order."""
    stages = {rank.pp: chunks for rank, chunks in sorted(files.ranks.items(), reverse=True)}
    order = chunk_order(files.pp, files.chunks_per_stage, files.schedules_method)
    return [(stage, chunk, sorted(_slots(stages[stage][chunk]))) for stage, chunk in order]
