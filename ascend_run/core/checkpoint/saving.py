"""Save: plan, write to a hidden folder, read back, publish, prune."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ascend_run.core.files import sync_folder
from ascend_run.plugin_api import AscendRunError, CheckpointError, StorageError
from ascend_run.plugin_api.contracts import TensorShard
from ascend_run.text import strict_json

from . import folders
from .boxes import Box, tiling_problem
from .integrity import checkpoint_problems, looks_valid, read_manifest_file
from .manifest import MANIFEST_NAME, Manifest, StoredShard, StoredTensor
from .rank_records import RankFile, RankPlan, TensorHeader, from_json, to_json
from .ranks import Ranks, together
from .shard_file import DTYPE_NAMES, name_in_file, shard_box, write_shard

log = logging.getLogger(__name__)

T = TypeVar("T")
_DISTRIBUTIONS: Final = ("ascend-run", "megatron-core", "torch")


class Save:
    """One save of one step by all ranks.

    Args:
        layout: Parallel sizes, recorded in the manifest.
        keep_last: Number of valid checkpoints to keep; 0 keeps all.
    """

    def __init__(
        self, folder: str, step: int, ranks: Ranks, layout: Mapping[str, int], keep_last: int
    ) -> None:
        self._folder = folder
        self._step = step
        self._ranks = ranks
        self._layout = layout
        self._keep_last = keep_last
        self._headline = f"cannot save checkpoint {folders.step_path(folder, step)}"

    def run(self, shards: Sequence[TensorShard], values: Mapping[str, Any]) -> str:
        """Save and return the path of the published checkpoint.

        Raises:
            CheckpointError: The shards or values cannot be saved; nothing was written.
            StorageError: Writing failed on some rank, or read back other bytes. What was written is
                removed; earlier checkpoints are unchanged.
        """
        given = together(self._ranks, self._headline, lambda: to_json(_plan(shards, values)))
        plans = [from_json(RankPlan, plan) for plan in given or []]
        needed = self._on_rank_0(lambda: _check_plans(plans))
        nonce = self._on_rank_0(lambda: self._begin(needed))
        hidden = folders.hidden_path(self._folder, self._step, nonce)
        try:
            given = together(
                self._ranks,
                self._headline,
                lambda: to_json(self._write(hidden, nonce, shards, needed)),
            )
            written = [from_json(RankFile, file) for file in given or [] if file is not None]
            self._on_rank_0(lambda: self._write_manifest(hidden, nonce, plans, written, values))
            together(self._ranks, self._headline, lambda: self._read_back(hidden))
            path = self._on_rank_0(lambda: self._publish(hidden, nonce))
        except AscendRunError:
            if self._ranks.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise
        if self._ranks.rank == 0:
            self._prune(nonce)
        return str(path)

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0; return its value, or raise its error, on every rank."""
        first = self._ranks.rank == 0
        results = together(self._ranks, self._headline, work if first else lambda: None)
        result: T = self._ranks.broadcast(None if results is None else results[0])
        return result

    def _begin(self, needed: int) -> str:
        """Create the hidden folder and return the nonce in its name."""
        with folders.storage_errors(self._folder, needed):
            folders.make_root(self._folder)
            folders.clear_leftovers(self._folder)
            free = folders.free_bytes(self._folder)
            if free is not None and free < needed:
                problem = (
                    f"{self._folder}: {needed} bytes needed, {free} bytes free; make room or "
                    "point checkpoint.save elsewhere (earlier checkpoints are as they were)"
                )
                raise StorageError(self._headline, [problem])
            nonce = secrets.token_hex(4)
            os.mkdir(folders.hidden_path(self._folder, self._step, nonce))
        return nonce

    def _write(
        self, hidden: str, nonce: str, shards: Sequence[TensorShard], needed: int
    ) -> RankFile | None:
        """Write this rank's file; None if it has nothing to write."""
        own = _written_shards(shards)
        if not own:
            return None
        name = f"rank_{self._ranks.rank:04d}.safetensors"
        metadata = {"format": "pt", "step": str(self._step), "save_id": nonce}
        with folders.storage_errors(hidden, needed):
            file, stored = write_shard(os.path.join(hidden, name), own, metadata)
        return RankFile(name, file, {key: list(shards) for key, shards in stored.items()})

    def _write_manifest(
        self,
        hidden: str,
        nonce: str,
        plans: Sequence[RankPlan],
        written: Sequence[RankFile],
        values: Mapping[str, object],
    ) -> None:
        shards: dict[str, list[StoredShard]] = {}
        for rank in written:
            for key, stored in rank.shards.items():
                shards.setdefault(key, []).extend(stored)
        headers = {key: header for plan in plans for key, header in plan.tensors.items()}
        manifest = Manifest(
            step=self._step,
            save_id=nonce,
            layout=self._layout,
            versions={name: importlib.metadata.version(name) for name in _DISTRIBUTIONS},
            values=values,
            tensors={
                key: StoredTensor(headers[key].dtype, headers[key].global_shape, tuple(stored))
                for key, stored in shards.items()
            },
            files={rank.name: rank.file for rank in written},
        )
        path = os.path.join(hidden, MANIFEST_NAME)
        with folders.storage_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                data = memoryview(manifest.render())
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(hidden)

    def _read_back(self, hidden: str) -> None:
        """Read back files, preferably those written by another rank."""
        try:
            manifest = read_manifest_file(os.path.join(hidden, MANIFEST_NAME))
            files = sorted(manifest.files)[
                (self._ranks.rank + 1) % self._ranks.size :: self._ranks.size
            ]
            problems = checkpoint_problems(hidden, manifest, files)
        except ValueError as error:
            problems = [str(error)]
        if problems:
            raise StorageError(
                self._headline, [f"read back after writing: {problem}" for problem in problems]
            )

    def _publish(self, hidden: str, nonce: str) -> str:
        with folders.storage_errors(hidden):
            return folders.publish(self._folder, hidden, self._step, nonce)

    def _prune(self, nonce: str) -> None:
        """Remove checkpoints older than the newest ``keep_last`` valid ones; never this one.

        A failed removal is a warning, since the checkpoint is already published.
        """
        if self._keep_last == 0:
            return
        kept = 1
        try:
            for step, path in reversed(folders.published(self._folder).items()):
                if step >= self._step:
                    continue
                if kept >= self._keep_last:
                    folders.retire(self._folder, path, nonce)
                elif looks_valid(path, step):
                    kept += 1
        except OSError as error:
            log.warning("old checkpoints in %s could not be removed: %s", self._folder, error)


def _written_shards(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Return the shards that this rank writes; empty shards of non-empty tensors are left out."""
    return [p for p in shards if p.writes and (p.tensor.numel() or 0 in p.global_shape)]


def _plan(shards: Sequence[TensorShard], values: Mapping[str, Any]) -> RankPlan:
    """Check what this rank saves."""
    problems = strict_json.value_problems(dict(values), "values")
    tensors: dict[str, TensorHeader] = {}
    for shard in shards:
        header = TensorHeader(DTYPE_NAMES.get(shard.tensor.dtype, ""), tuple(shard.global_shape))
        if not shard.key:
            problems.append(f"a shard of shape {list(shard.tensor.shape)} has no key")
        if not header.dtype:
            problems.append(f"{shard.key}: safetensors has no dtype for {shard.tensor.dtype}")
        if tensors.setdefault(shard.key, header) != header:
            problems.append(f"{shard.key}: given as {tensors[shard.key]} and as {header}")
    own = _written_shards(shards)
    counts = Counter(name_in_file(shard) for shard in own)
    problems += [f"{name}: written twice" for name in sorted(counts) if counts[name] > 1]
    if problems:
        raise CheckpointError("some tensors or values cannot be saved", problems)
    boxes: dict[str, list[Box]] = {}
    for shard in own:
        boxes.setdefault(shard.key, []).append(shard_box(shard))
    digests = {key: hashlib.sha256(strict_json.render(v)).hexdigest() for key, v in values.items()}
    size = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in own)
    return RankPlan(tensors, boxes, digests, size)


def _check_plans(plans: Sequence[RankPlan]) -> int:
    """Check that all ranks together hold every tensor exactly once; return the total bytes.

    Raises:
        CheckpointError: Elements are missing or duplicated, or ranks have different values.
    """
    problems: list[str] = []
    headers: dict[str, TensorHeader] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, plan in enumerate(plans):
        if plan.values != plans[0].values:
            keys = sorted(k for k, _ in plan.values.items() ^ plans[0].values.items())
            problems.append(
                f"rank {rank} has different values than rank 0: {', '.join(dict.fromkeys(keys))}"
            )
        for key, header in plan.tensors.items():
            if headers.setdefault(key, header) != header:
                problems.append(f"{key}: rank {rank} has {header}, another rank {headers[key]}")
        for key, parts in plan.boxes.items():
            boxes.setdefault(key, []).extend(parts)
    for key, header in headers.items():
        if (problem := tiling_problem(header.global_shape, boxes.get(key, []))) is not None:
            problems.append(f"{key}: {problem}")
    if problems:
        raise CheckpointError("some tensors or values cannot be saved", problems)
    return sum(plan.nbytes for plan in plans)
