"""A model that is read parameter by parameter, whatever format stores it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import parameter_sources
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.plugin_api.errors import CheckpointError, StorageError
from ascend_run.plugin_api.file_collisions import NamedPath, refuse_collisions
from ascend_run.types.config import RunConfig

Progress = Callable[[str, int, int], None]
"""Progress callback: stage name, bytes done, total bytes."""


@attrs.frozen(kw_only=True)
class ModelSource:
    """A stored model: what it is, and its parameters.

    Parameters are named and shaped as in our GPTModel: global layer numbers, no shards. The rows of
    the vocabulary may be padded.
    """

    family: ModelFamily
    config: RunConfig
    config_toml: str
    """Text of the resolved config."""
    step: int
    folder: Path
    """The folder that is read."""
    headers: Mapping[str, Tensor]
    """Name -> tensor on the device ``meta``, with the stored dtype."""
    read: Callable[[str], Tensor]
    """Reads one parameter."""

    def parameters(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), one in memory at a time."""
        done = 0
        for name, header in self.headers.items():
            yield name, self.read(name)
            done += header.nbytes
            progress("write", done, self.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.headers.values())

    def require_complete(self, target: str) -> None:
        """Check that the parameters are those of the family.

        Raises:
            CheckpointError: A parameter is missing or has no counterpart; lists all.
        """
        expected = parameter_sources(self.family, self.config)
        problems = [f"parameter {name} is missing" for name in expected if name not in self.headers]
        problems += [
            f"parameter {name} does not exist in a {self.family.architecture}"
            for name in self.headers
            if name not in expected
        ]
        if problems:
            raise CheckpointError(f"this model cannot be written as {target}", problems)


def refuse_taken(target: Path) -> None:
    """
    Raises:
        StorageError: The target exists and is not empty.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise StorageError(f"{target} exists and is not empty; name a new folder")


def require_outside(target: Path, source: Path) -> None:
    """
    Raises:
        ConfigError: The target is the source or inside it.
    """
    refuse_collisions((), [NamedPath("TARGET", target)], [NamedPath("SOURCE", source)])


@contextmanager
def new_folder(target: Path, mode: int = 0o750) -> Iterator[Path]:
    """Yield a temporary folder, renamed to the target if the block succeeds and removed if not.

    Raises:
        StorageError: The target is not empty or cannot be written.
    """
    refuse_taken(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield beside
            beside.chmod(mode)  # mkdtemp creates it for the owner only
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise StorageError(f"{target} cannot be written: {problem.strerror or problem}") from None
