"""Our own checkpoints: read one of a run, and write a run folder with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore, choose, folders
from ascend_run.core.checkpoint.loading import fill
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.contracts import TensorShard
from ascend_run.plugin_api.errors import CheckpointError, ConfigError
from ascend_run.tools.convert.new_folder import new_folder

from .model_source import ModelSource, Progress

_PREFIX: Final = "model/"
_OPTIMIZER: Final = "optimizer/"
_STEP: Final = re.compile(r"step_(\d{8,})")
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
            raise CheckpointError(f"{path} has no checkpoint of ascend-run")
        if config is None:
            places = (absolute, folder, folder.parent)
            config = next((p / CONFIG_NAME for p in places if (p / CONFIG_NAME).is_file()), None)
        if config is None:
            raise ConfigError(
                f"no {CONFIG_NAME} next to {path}, which is needed to interpret its tensors; "
                "name the run's config with --config"
            )
        return cls(folder=folder, step=step, config=config)


@attrs.frozen
class StoredCheckpoint:
    """The parameters of a verified checkpoint."""

    step: int
    headers: dict[str, Tensor]
    read: Callable[[str], Tensor]
    values: Mapping[str, Any]
    """The JSON values of the run's entries."""


def open_checkpoint(source: CheckpointSource, weights: str | None = None) -> StoredCheckpoint:
    """Verify a checkpoint and return its first model.

    Args:
        weights: State of the optimizer to return as the weights, in their dtype. A parameter
            without it, which was not trained, is returned as it is.

    Raises:
        CheckpointError: It is missing, corrupt, or has no model or no such state.
    """
    store = FileStore(source.folder)
    step = choose(store, source.step, required=True).step
    assert step is not None
    manifest = store.manifest(step)
    path = folders.published(store.folder)[step]
    stored = {
        key: torch.empty(entry.global_shape, dtype=_DTYPES[entry.dtype], device="meta")
        for key, entry in manifest.tensors.items()
    }
    headers = _below(_PREFIX, stored)
    if not headers:
        raise CheckpointError(f"{path} has no tensors of a model")
    states = {} if weights is None else _states(weights, stored, headers, path)

    def read(name: str) -> Tensor:
        key = states.get(name, _PREFIX + name)
        tensor = torch.empty_like(stored[key], device="cpu")
        fill(path, manifest, [_shard(key, tensor)])
        return tensor.to(headers[name].dtype)

    return StoredCheckpoint(step, headers, read, manifest.values)


def _below(prefix: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key.removeprefix(prefix): header for key, header in stored.items() if key.startswith(prefix)
    }


def _states(
    name: str, stored: Mapping[str, Tensor], headers: Mapping[str, Tensor], path: str
) -> dict[str, str]:
    """Return parameter -> key of a state of the optimizer.

    Raises:
        CheckpointError: No parameter has a state of this name and of its own shape; lists those
            that there are.
    """
    found: dict[str, dict[str, str]] = {}
    for rest, header in _below(_OPTIMIZER, stored).items():
        state, _, parameter = rest.partition("/")
        if parameter in headers and headers[parameter].shape == header.shape:
            found.setdefault(state, {})[parameter] = f"{_OPTIMIZER}{rest}"
    if name not in found:
        raise CheckpointError(
            f"{path} has no state {name!r} of an optimizer with the shapes of the weights; it has "
            + (", ".join(sorted(found)) or "none")
        )
    return found[name]


def write_checkpoint(target: Path, source: ModelSource, progress: Progress) -> None:
    """Write a run folder with one checkpoint of the model's weights, in the stored dtypes.

    One parameter is in memory at a time. The vocabulary is written without padding.

    Raises:
        CheckpointError: A parameter is missing, or unknown.
        StorageError: The target is not empty or cannot be written.
    """
    source.require_complete("a checkpoint of ascend-run")
    done = 0

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            nonlocal done
            tensor = source.tensor(name)
            done += tensor.nbytes
            progress("write", done, source.nbytes)
            return tensor

        return read

    with new_folder(target) as beside:
        shards = [
            attrs.evolve(_shard(_PREFIX + name, header), read=reader(name))
            for name, header in source.headers.items()
        ]
        FileStore(beside / "checkpoints").save(source.step, shards, {})
        (beside / CONFIG_NAME).write_text(source.config_toml, "utf-8")


def _shard(key: str, tensor: Tensor) -> TensorShard:
    shape = tuple(tensor.shape)
    offset = (0,) * len(shape)
    return TensorShard(key=key, tensor=tensor, global_shape=shape, offset=offset)
