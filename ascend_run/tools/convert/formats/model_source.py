"""A model that is read parameter by parameter, whatever format stores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import parameter_sources
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.plugin_api.errors import CheckpointError
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
    stated: frozenset[str]
    """Fields of ``[model]`` that the files state; the others have a default."""
    args: Mapping[str, Any] = attrs.field(factory=dict)
    """Megatron's command line, of its formats."""
    hf_folder: Path | None = None
    """The Hugging Face folder that it is, or that the run began with, which has its tokenizer."""
    num_merged: int = 0
    """Parameters that are merged with an adapter when they are read."""

    def tensor(self, name: str) -> Tensor:
        """Read one parameter.

        Raises:
            CheckpointError: Its files cannot be read.
        """
        try:
            return self.read(name)
        except OSError as problem:
            file = problem.filename or self.folder
            raise CheckpointError(
                f"{file} cannot be read: {problem.strerror or problem} (at parameter {name})"
            ) from None

    def parameters(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), one in memory at a time."""
        done = 0
        for name, header in self.headers.items():
            yield name, self.tensor(name)
            done += header.nbytes
            progress("write", done, self.nbytes)

    @property
    def family_name(self) -> str:
        """Name of the family's plugin; several may share a ``model_type``."""
        name: str = self.config.model.family
        return name

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
