"""Integrity check of checkpoints on disk: checksums cover every byte."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from ascend_run.core.file_ranges import range_crc32
from ascend_run.plugin_api import CheckpointError

from .manifest import MANIFEST_NAME, Manifest, StoredFile
from .shard_file import HeaderEntry, open_shard, read_header


def read_manifest(path: str, step: int) -> Manifest:
    """Return the manifest of the published checkpoint at ``path``.

    Raises:
        CheckpointError: The manifest is missing, was changed, or belongs to another step.
    """
    try:
        if os.path.islink(path):
            raise ValueError("the checkpoint's folder is a symbolic link")
        manifest = read_manifest_file(os.path.join(path, MANIFEST_NAME))
        if manifest.step != step:
            raise ValueError(f"{MANIFEST_NAME} is that of step {manifest.step}")
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is corrupt", [str(error)]) from error
    return manifest


def read_manifest_file(path: str) -> Manifest:
    """Read one ``manifest.json``.

    Raises:
        ValueError: The file cannot be read, or was changed.
    """
    try:
        with open_shard(path) as descriptor:
            data = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
        return Manifest.parse(data)
    except OSError as error:
        raise ValueError(f"{MANIFEST_NAME}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{MANIFEST_NAME}: {error}") from error


def looks_valid(path: str, step: int) -> bool:
    """Return whether the manifest is valid and the files have the right sizes; reads no tensors."""
    try:
        for name, file in read_manifest(path, step).files.items():
            _check_size(os.path.join(path, name), name, file)
    except (CheckpointError, ValueError):
        return False
    return True


def checkpoint_problems(path: str, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Return the problems of some of a checkpoint's files, by file and tensor.

    Args:
        path: Folder of the files, published or not.
    """
    problems: list[str] = []
    for name in files:
        problems += _file_problems(path, manifest, name)
    return problems


def checked_header(manifest: Manifest, file: str, descriptor: int) -> dict[str, HeaderEntry]:
    """Return the tensors of an open file, checked against the manifest.

    Raises:
        ValueError: The header differs from the saved one; names the file and, if known, the tensor.
    """
    try:
        digest, entries = read_header(descriptor)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; it holds {_first_tensors(manifest, file)}") from error
    for key, tensor, shard in manifest.by_file[file]:
        entry = entries.get(shard.name)
        if entry is None:
            raise ValueError(f"{file}: tensor {key!r} is missing")
        if (entry.dtype, entry.shape) != (tensor.dtype, shard.box.shape):
            raise ValueError(
                f"{file}: tensor {key!r} is {entry.dtype} {list(entry.shape)}, "
                f"the manifest says {tensor.dtype} {list(shard.box.shape)}"
            )
    if digest != manifest.files[file].header_sha256:
        raise ValueError(
            f"{file}: its header differs from the saved one: the file belongs to another save "
            f"or was changed; it holds {_first_tensors(manifest, file)}"
        )
    return entries


def _file_problems(path: str, manifest: Manifest, name: str) -> list[str]:
    full = os.path.join(path, name)
    try:
        _check_size(full, name, manifest.files[name])
        with open_shard(full) as descriptor:
            entries = checked_header(manifest, name, descriptor)
            problems = []
            for key, _, shard in manifest.by_file[name]:
                entry = entries[shard.name]
                found = range_crc32(descriptor, entry.begin, entry.end)
                if found != shard.crc32:
                    problems.append(
                        f"{name}: tensor {key!r} has checksum {found}, saved with {shard.crc32}"
                    )
            return problems
    except OSError as error:
        return [f"{name}: {error.strerror}; it holds {_first_tensors(manifest, name)}"]
    except EOFError as error:
        return [f"{name}: {error}; it holds {_first_tensors(manifest, name)}"]
    except _WrongSize as error:
        return [f"{error}; it holds {_first_tensors(manifest, name)}"]
    except ValueError as error:
        return [str(error)]


class _WrongSize(ValueError):
    pass


def _check_size(path: str, name: str, file: StoredFile) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise _WrongSize(f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise _WrongSize(f"{name}: it is not a regular file")
    if status.st_size != file.size:
        raise _WrongSize(f"{name}: it has {status.st_size} bytes, saved with {file.size}")


def _first_tensors(manifest: Manifest, file: str) -> str:
    keys = sorted({key for key, _, _ in manifest.by_file[file]})
    rest = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"tensor {', '.join(map(repr, keys[:3]))}{rest}"
