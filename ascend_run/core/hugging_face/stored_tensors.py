"""Read slices of a Hugging Face folder's tensors, from safetensors files only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ascend_run.ops.experts.mxfp4 import with_packed
from ascend_run.plugin_api.errors import CheckpointError

from .json_files import read_object

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_FILE_NAME: Final = re.compile(r"[^/\\\0]+\.safetensors")
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class StoredTensors:
    """The tensors of one folder by name; a context manager that keeps its files open.

    Raises:
        CheckpointError: There is no safetensors file, or a file is missing, corrupt, or outside the
            folder. Lists all problems of the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = contextlib.ExitStack()
        self._slices: dict[str, Any] = {}
        try:
            if (self.folder / SINGLE_FILE).is_file():
                self._take(self._open(SINGLE_FILE))
            elif (self.folder / INDEX_FILE).is_file():
                self._take_indexed()
            else:
                raise CheckpointError(self._nothing_here())
            self._slices = with_packed(self._slices)
        except BaseException:
            self._files.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slices)

    def complete_names(self, prefix: str, but: str) -> None:
        """Add a prefix to all names except ``but``, if no name has it."""
        if not any(name.startswith(prefix) for name in self._slices):
            self._slices = {
                name if name == but else prefix + name: stored
                for name, stored in self._slices.items()
            }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._slices[name].get_dtype()]

    def rows(
        self,
        name: str,
        rows: slice,
        columns: slice | None = None,
        *,
        transposed: bool = False,
        expert: int | None = None,
    ) -> Tensor:
        """Read rows of a tensor, and only ``columns`` of a matrix.

        Args:
            transposed: Rows and columns are those of the transpose.
            expert: Index on the first axis of a tensor that stacks such matrices.
        """
        near = slice(rows.start, rows.stop)  # safetensors reads consecutive rows
        where = (near,) if columns is None else (near, columns)
        if transposed:
            where = (columns or slice(None), near)
        try:
            part: Tensor = self._slices[name][where if expert is None else (expert, *where)]
            return (part.t() if transposed else part)[:: rows.step]
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(
                f"{self.folder}: tensor {name} cannot be read: {problem}"
            ) from None

    def unreadable(self, names: Iterable[str]) -> list[str]:
        """Return a message for each name whose dtype is not a plain floating point dtype."""
        return [
            f"{name} is stored as {dtype}; only {', '.join(sorted(_DTYPES))} can be read (undo the "
            "quantization first)"
            for name in sorted(names)
            if (dtype := self._slices[name].get_dtype()) not in _DTYPES
        ]

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.close()
        self._slices.clear()

    def _open(self, file: str) -> Any:
        path = self.folder / file
        try:
            return self._files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as problem:
            raise CheckpointError(
                f"{path} is corrupt or truncated ({problem}); fetch it again"
            ) from None
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem}") from None

    def _take(self, handle: Any) -> None:
        for name in handle.keys():  # noqa: SIM118  (not a mapping)
            self._slices[name] = handle.get_slice(name)

    def _take_indexed(self) -> None:
        """Open the files in the index; each tensor must be in the file that the index names."""
        index = self.folder / INDEX_FILE
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected a 'weight_map' of tensor names to files")
        files = {str(file) for file in weight_map.values()}
        problems = [problem for file in sorted(files) if (problem := self._file_problem(file))]
        if problems:
            raise CheckpointError(f"{index} cannot be followed", problems)
        held: dict[str, str] = {}
        for file in sorted(files):
            handle = self._open(file)
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                if name in held:
                    problems.append(f"{name} is in both {held[name]} and {file}")
                held[name] = file
            self._take(handle)
        for name, file in sorted(weight_map.items()):
            if held.get(name) != file:
                problems.append(f"{name} is not in {file}")
        if problems:
            raise CheckpointError(f"{index} does not describe its files", problems)

    def _file_problem(self, file: str) -> str | None:
        if not _FILE_NAME.fullmatch(file):
            return f"{file!r} is not the name of a file in this folder"
        if not (self.folder / file).is_file():
            return f"{file} is missing; fetch the folder again"
        return None

    def _nothing_here(self) -> str:
        if not self.folder.is_dir():
            return f"no Hugging Face folder at {self.folder}"
        pickles = sorted(
            path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(suffix)
        )
        if not pickles:
            return f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        return (
            f"{self.folder} holds pickles only ({pickles[0]}), which can run code when read and "
            "are never opened here; where you trust them, load them with transformers and write "
            "them again with save_pretrained, which makes safetensors"
        )
