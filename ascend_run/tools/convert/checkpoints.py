"""Convert between checkpoints and Hugging Face folders, in one process and without a model."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore, choose, folders
from ascend_run.core.checkpoint.loading import fill
from ascend_run.core.checkpoint.manifest import Manifest
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.core.hugging_face.importing import Progress, read_hf_model
from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.contracts import ModelFamily, TensorShard
from ascend_run.plugin_api.errors import CheckpointError, ConfigError, StorageError
from ascend_run.plugin_api.file_collisions import NamedPath, refuse_collisions
from ascend_run.types.config import RunConfig

from .exporting import export_hf

_PREFIX: Final = "model/"
_STEP: Final = re.compile(r"step_(\d{8,})")
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@attrs.frozen(kw_only=True)
class Converted:
    """Summary of what was written."""

    folder: str
    step: int
    tensors: int
    """Number of parameter tensors of the whole model."""
    bytes: int


@attrs.frozen(kw_only=True)
class CheckpointSource:
    """Location of a checkpoint and of its run's config."""

    folder: Path
    """Folder of the checkpoints."""
    step: int | None
    """None: the newest valid one."""
    config: Path

    @classmethod
    def find(cls, path: Path, step: int | None, config: Path | None) -> CheckpointSource:
        """Find a checkpoint in a run folder, a folder of checkpoints, or a checkpoint's folder.

        Args:
            step: Step of the checkpoint; None: the newest, or the one that ``path`` names.
            config: Config to use instead of the run's ``config.toml``.

        Raises:
            CheckpointError: The path has no checkpoint; says what it seems to be.
            ConfigError: The run's config is missing.
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
                f"no {CONFIG_NAME} next to {path}, which is needed to interpret its tensors; "
                "name the run's config with --config"
            )
        return cls(folder=folder, step=step, config=config)


def export_checkpoint(
    source: CheckpointSource,
    family: ModelFamily,
    config: RunConfig,
    target: Path,
    progress: Progress,
) -> Converted:
    """Write the model of a checkpoint as a Hugging Face folder, after an integrity check.

    Raises:
        CheckpointError: It is missing, corrupt, or of another model.
        ConfigError: The family's Hugging Face class does not support this model's config, or the
            target is inside the folder of checkpoints.
        StorageError: The target is not empty or cannot be written.
    """
    _require_outside(target, source.folder)
    store = FileStore(source.folder)
    step = choose(store, source.step, required=True).step
    assert step is not None
    manifest = store.manifest(step)
    path = folders.published(store.folder)[step]
    sizes = _sizes(manifest)
    if not sizes:
        raise CheckpointError(f"{path} has no tensors of a model")
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

    The checkpoint has only the model's weights, in the stored dtypes.

    Args:
        config_toml: Text of the resolved config.
        target: Must not exist, or be empty; written to a temporary folder and renamed.

    Raises:
        CheckpointError: The folder cannot be read or is of another model.
        ConfigError: The target is inside the source.
        StorageError: The target is not empty or cannot be written.
    """
    _require_outside(target, source)
    refuse_taken(target)
    shards = read_hf_model(source, family, config, progress)
    size = sum(shard.tensor.nbytes for shard in shards)
    progress("write", 0, size)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            keyed = [attrs.evolve(shard, key=_PREFIX + shard.key) for shard in shards]
            FileStore(beside / "checkpoints").save(0, keyed, {})
            (beside / CONFIG_NAME).write_text(config_toml, "utf-8")
            beside.chmod(0o750)
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise StorageError(f"{target} cannot be written: {problem.strerror or problem}") from None
    progress("write", size, size)
    return Converted(folder=str(target), step=0, tensors=len(shards), bytes=size)


def refuse_taken(target: Path) -> None:
    """
    Raises:
        StorageError: The target exists and is not empty.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise StorageError(f"{target} exists and is not empty; name a new folder")


def _require_outside(target: Path, source: Path) -> None:
    refuse_collisions((), [NamedPath("TARGET", target)], [NamedPath("SOURCE", source)])


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Size in bytes of every tensor of the first model."""
    return {
        key: torch.Size(stored.global_shape).numel() * _DTYPES[stored.dtype].itemsize
        for key, stored in manifest.tensors.items()
        if key.startswith(_PREFIX)
    }


def _parameters(
    path: str, manifest: Manifest, sizes: dict[str, int], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """(name in Megatron's GPTModel, full tensor), one at a time."""
    done, total = 0, sum(sizes.values())
    for key, size in sizes.items():
        stored = manifest.tensors[key]
        tensor = torch.empty(stored.global_shape, dtype=_DTYPES[stored.dtype])
        offset = (0,) * tensor.dim()
        shard = TensorShard(key=key, tensor=tensor, global_shape=stored.global_shape, offset=offset)
        fill(path, manifest, [shard])
        yield key.removeprefix(_PREFIX), tensor
        done += size
        progress("write", done, total)


def _no_checkpoint(path: Path) -> str:
    seems: dict[str, object] = {
        "config.json": "it seems to be in Hugging Face format, which --from-hf reads",
        "latest_checkpointed_iteration.txt": "it seems to be Megatron's, which is not supported",
        ".metadata": "it seems to be torch.distributed.checkpoint's, which is not supported",
    }
    found = next((words for name, words in seems.items() if (path / name).exists()), None)
    return f"{path} has no checkpoint of ascend-run" + (f"; {found}" if found else "")
