"""A checkpoint of ours and a Hugging Face folder, both ways, on one process and without a model."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore, choose, folders
from ascend_run.core.checkpoint.loading import fill
from ascend_run.core.checkpoint.manifest import Manifest
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ModelFamily, ShardPiece
from ascend_run.plugin_api.errors import CheckpointError, ConfigError, StorageError

from .exporting import export_hf
from .importing import Progress, read_hf_model

CONFIG_NAME: Final = "config.toml"
_PREFIX: Final = "model/"
_STEP: Final = re.compile(r"step_(\d{8,})")
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@attrs.frozen(kw_only=True)
class Converted:
    """What was written."""

    folder: str
    step: int
    tensors: int
    """Parameters of the whole model."""
    bytes: int


@attrs.frozen(kw_only=True)
class CheckpointSource:
    """Where a checkpoint and the config of its run lie."""

    folder: Path
    """Of the checkpoints."""
    step: int | None
    """None: the newest sound one."""
    config: Path

    @classmethod
    def find(cls, path: Path, step: int | None, config: Path | None) -> CheckpointSource:
        """A run folder, its folder of checkpoints, or one checkpoint.

        Args:
            step: Which checkpoint; None is the newest, or the one that ``path`` names.
            config: In place of the run's ``config.toml``.

        Raises:
            CheckpointError: It is none of them; says what it seems to be.
            ConfigError: The run's config is not where it belongs.
        """
        if not path.is_dir():
            raise CheckpointError(f"no folder at {path}; name a run folder or a checkpoint in it")
        absolute = path.absolute()
        if (absolute / "manifest.json").is_file() and (named := _STEP.fullmatch(absolute.name)):
            if step not in (None, int(named[1])):
                raise CheckpointError(f"{path} is of step {int(named[1])}, not of step {step}")
            folder, step = absolute.parent, int(named[1])
        elif folders.published(str(absolute)):
            folder = absolute
        elif folders.published(str(absolute / "checkpoints")):
            folder = absolute / "checkpoints"
        else:
            raise CheckpointError(_no_checkpoint(path))
        if config is None:
            places = (absolute, folder, folder.parent)
            config = next((p / CONFIG_NAME for p in places if (p / CONFIG_NAME).is_file()), None)
        if config is None:
            raise ConfigError(
                f"no {CONFIG_NAME} beside {path}, which says what its tensors mean; name the "
                "run's own with --config"
            )
        return cls(folder=folder, step=step, config=config)


def export_checkpoint(
    source: CheckpointSource,
    family: ModelFamily,
    config: RunConfig,
    target: Path,
    progress: Progress,
) -> Converted:
    """Write the model of a checkpoint as a Hugging Face folder; every byte of it is checked first.

    Raises:
        CheckpointError: It is missing, corrupt, or not of this model.
        ConfigError: The family's Hugging Face class cannot have this model's config.
        StorageError: The target is not empty, or the file system refuses.
    """
    store = FileStore(source.folder)
    step = choose(store, source.step, required=True).step
    assert step is not None
    manifest = store.manifest(step)
    path = folders.published(store.folder)[step]
    sizes = _sizes(manifest)
    if not sizes:
        raise CheckpointError(f"{path} holds no tensor of a model")
    export_hf(target, family, config, _parameters(path, manifest, sizes, progress))
    return Converted(folder=str(target), step=step, tensors=len(sizes), bytes=sum(sizes.values()))


def import_checkpoint(
    source: Path,
    family: ModelFamily,
    config: RunConfig,
    config_toml: str,
    target: Path,
    progress: Progress,
) -> Converted:
    """Write a Hugging Face folder as a run folder with one checkpoint, of step 0.

    The checkpoint holds the model's weights, in the stored dtypes, and nothing else.

    Args:
        config_toml: The resolved config as a file.
        target: Must not exist, or be empty; written beside and renamed when whole.

    Raises:
        CheckpointError: The folder cannot be read or is not of this model.
        StorageError: The target is not empty, or the file system refuses.
    """
    refuse_taken(target)
    pieces = read_hf_model(source, family, config, progress)
    size = sum(piece.tensor.nbytes for piece in pieces)
    progress("write", 0, size)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            keyed = [attrs.evolve(piece, key=_PREFIX + piece.key) for piece in pieces]
            FileStore(beside / "checkpoints").save(0, keyed, {})
            (beside / CONFIG_NAME).write_text(config_toml, "utf-8")
            beside.chmod(0o750)
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise StorageError(f"{target} cannot be written: {problem.strerror or problem}") from None
    progress("write", size, size)
    return Converted(folder=str(target), step=0, tensors=len(pieces), bytes=size)


def refuse_taken(target: Path) -> None:
    """Raises:
    StorageError: Something stands at the target already.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise StorageError(f"{target} exists and is not empty; name a new folder")


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Bytes of every tensor of the first model."""
    return {
        key: torch.Size(stored.global_shape).numel() * _DTYPES[stored.dtype].itemsize
        for key, stored in manifest.tensors.items()
        if key.startswith(_PREFIX)
    }


def _parameters(
    path: str, manifest: Manifest, sizes: dict[str, int], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """(name in Megatron's GPTModel, whole tensor), one at a time."""
    done, total = 0, sum(sizes.values())
    for key, size in sizes.items():
        stored = manifest.tensors[key]
        tensor = torch.empty(stored.global_shape, dtype=_DTYPES[stored.dtype])
        offset = (0,) * tensor.dim()
        piece = ShardPiece(key=key, tensor=tensor, global_shape=stored.global_shape, offset=offset)
        fill(path, manifest, [piece])
        yield key.removeprefix(_PREFIX), tensor
        done += size
        progress("write", done, total)


def _no_checkpoint(path: Path) -> str:
    seems: dict[str, Any] = {
        "config.json": "it seems to be in Hugging Face's form, which --from-hf reads",
        "latest_checkpointed_iteration.txt": "it seems to be one of Megatron's, which is not read",
        ".metadata": "it seems to be one of torch.distributed.checkpoint's, which is not read",
    }
    found = next((words for name, words in seems.items() if (path / name).exists()), None)
    return f"{path} holds no checkpoint of ascend-run" + (f"; {found}" if found else "")
