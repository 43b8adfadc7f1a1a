"""One save: agree on what is written, write it beside, read it back, publish it, prune."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_run.core import strict_json
from ascend_run.core.files import sync_folder
from ascend_run.plugin_api import AscendRunError, CheckpointError, StorageError
from ascend_run.plugin_api.contracts import ShardPiece

from . import folders
from .boxes import Box, tiling_problem
from .manifest import MANIFEST_NAME, Manifest, StoredFile, StoredPiece, StoredTensor
from .ranks import Ranks, together
from .shard_file import DTYPE_NAMES, name_in_file, piece_box, write_shard
from .soundness import checkpoint_problems, looks_sound, read_manifest_file

log = logging.getLogger(__name__)

_DISTRIBUTIONS: Final = ("ascend-run", "megatron-core", "torch")


class Save:
    """One save of one step by all ranks.

    Args:
        layout: Sizes of the parallel axes, for the manifest.
        keep_last: How many sound checkpoints stay; 0 keeps all.
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

    def run(self, pieces: Sequence[ShardPiece], values: Mapping[str, Any]) -> str:
        """Do it; the path of the published checkpoint.

        Raises:
            CheckpointError: The pieces or values cannot be saved; nothing was written.
            StorageError: The file system refused on some rank, or gave back other bytes than were
                written. What was written is removed; earlier checkpoints are as they were.
        """
        plans = together(self._ranks, self._headline, lambda: _plan(pieces, values))
        needed = self._on_rank_0(lambda: _check_plans(plans or []))
        nonce = self._on_rank_0(lambda: self._begin(needed))
        hidden = folders.hidden_path(self._folder, self._step, nonce)
        try:
            written = together(
                self._ranks, self._headline, lambda: self._write(hidden, nonce, pieces, needed)
            )
            self._on_rank_0(
                lambda: self._write_manifest(hidden, nonce, plans or [], written or [], values)
            )
            together(self._ranks, self._headline, lambda: self._read_back(hidden))
            path = self._on_rank_0(lambda: self._publish(hidden, nonce))
        except AscendRunError:
            if self._ranks.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise
        if self._ranks.rank == 0:
            self._prune(nonce)
        return str(path)

    def _on_rank_0(self, work: Any) -> Any:
        """Do a step on rank 0 alone; its answer, or its failure, on every rank."""
        first = self._ranks.rank == 0
        answers = together(self._ranks, self._headline, work if first else lambda: None)
        return self._ranks.broadcast(None if answers is None else answers[0])

    def _begin(self, needed: int) -> str:
        """Make the hidden folder; the nonce that names it."""
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
        self, hidden: str, nonce: str, pieces: Sequence[ShardPiece], needed: int
    ) -> list[Any] | None:
        """Write this rank's file; its record as JSON, None where it has nothing to write."""
        own = _written_pieces(pieces)
        if not own:
            return None
        name = f"rank_{self._ranks.rank:04d}.safetensors"
        metadata = {"format": "pt", "step": str(self._step), "save_id": nonce}
        with folders.storage_errors(hidden, needed):
            file, stored = write_shard(os.path.join(hidden, name), own, metadata)
        records = [
            [key, piece.name, piece.box.offset, piece.box.shape, piece.crc32]
            for key, pieces_of_key in stored.items()
            for piece in pieces_of_key
        ]
        return [name, file.size, file.header_sha256, records]

    def _write_manifest(
        self,
        hidden: str,
        nonce: str,
        plans: Sequence[Any],
        written: Sequence[Any],
        values: Mapping[str, Any],
    ) -> None:
        files: dict[str, StoredFile] = {}
        pieces: dict[str, list[StoredPiece]] = {}
        for name, size, header_sha256, records in filter(None, written):
            files[name] = StoredFile(size, header_sha256)
            for key, in_file, offset, shape, crc32 in records:
                piece = StoredPiece(name, in_file, Box(tuple(offset), tuple(shape)), crc32)
                pieces.setdefault(key, []).append(piece)
        about = {key: tensor for plan in plans for key, tensor in plan["tensors"].items()}
        manifest = Manifest(
            step=self._step,
            save_id=nonce,
            layout=self._layout,
            versions={name: importlib.metadata.version(name) for name in _DISTRIBUTIONS},
            values=values,
            tensors={
                key: StoredTensor(about[key][0], tuple(about[key][1]), tuple(stored))
                for key, stored in pieces.items()
            },
            files=files,
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
        """Read some of the files as another reader would; each rank another's where it can."""
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
        """Remove what is older than the newest ``keep_last`` sound ones; never this one.

        A failure to remove is a warning: the checkpoint is published.
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
                elif looks_sound(path, step):
                    kept += 1
        except OSError as error:
            log.warning("old checkpoints in %s could not be removed: %s", self._folder, error)


def _written_pieces(pieces: Sequence[ShardPiece]) -> list[ShardPiece]:
    """What this rank writes: empty parts of tensors that are not empty themselves have no bytes."""
    return [p for p in pieces if p.writes and (p.tensor.numel() or 0 in p.global_shape)]


def _plan(pieces: Sequence[ShardPiece], values: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank has, as JSON, once it is known to be savable."""
    problems = strict_json.value_problems(dict(values), "values")
    tensors: dict[str, list[Any]] = {}
    for piece in pieces:
        about = [DTYPE_NAMES.get(piece.tensor.dtype, ""), list(piece.global_shape)]
        if not piece.key:
            problems.append(f"a piece of shape {list(piece.tensor.shape)} has no key")
        if not about[0]:
            problems.append(f"{piece.key}: safetensors has no dtype for {piece.tensor.dtype}")
        if tensors.setdefault(piece.key, about) != about:
            problems.append(f"{piece.key}: given as {tensors[piece.key]} and as {about}")
    own = _written_pieces(pieces)
    counts = Counter(name_in_file(piece) for piece in own)
    problems += [f"{name}: written twice" for name in sorted(counts) if counts[name] > 1]
    if problems:
        raise CheckpointError("these cannot be saved", problems)
    boxes: dict[str, list[Any]] = {}
    for piece in own:
        box = piece_box(piece)
        boxes.setdefault(piece.key, []).append([box.offset, box.shape])
    digests = {key: hashlib.sha256(strict_json.render(v)).hexdigest() for key, v in values.items()}
    size = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in own)
    return {"tensors": tensors, "boxes": boxes, "values": digests, "bytes": size}


def _check_plans(plans: Sequence[Any]) -> int:
    """Whether the ranks together hold every tensor exactly once; the bytes that they will write.

    Raises:
        CheckpointError: They do not, or they disagree.
    """
    problems: list[str] = []
    about: dict[str, list[Any]] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, plan in enumerate(plans):
        if plan["values"] != plans[0]["values"]:
            keys = sorted(
                k for k, _ in set(plan["values"].items()) ^ set(plans[0]["values"].items())
            )
            problems.append(
                f"rank {rank} has other values than rank 0: {', '.join(dict.fromkeys(keys))}"
            )
        for key, tensor in plan["tensors"].items():
            if about.setdefault(key, tensor) != tensor:
                problems.append(f"{key}: rank {rank} has {tensor}, another rank {about[key]}")
        for key, parts in plan["boxes"].items():
            boxes.setdefault(key, []).extend(Box(tuple(o), tuple(n)) for o, n in parts)
    for key, (_, global_shape) in about.items():
        if (problem := tiling_problem(global_shape, boxes.get(key, []))) is not None:
            problems.append(f"{key}: {problem}")
    if problems:
        raise CheckpointError("these cannot be saved", problems)
    return sum(int(plan["bytes"]) for plan in plans)
