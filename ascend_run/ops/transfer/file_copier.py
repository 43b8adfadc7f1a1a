"""Copies between a device and memory-mapped files, for machines whose device is the host itself."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TypeAlias

import torch
from torch import Tensor

_CHUNK: Final = 16 * 2**20
"""Bytes that are mapped at once while copying; a multiple of every page size."""
Refusal: TypeAlias = Callable[[OSError, int], Exception]
"""Returns what is raised for an error of the file system, about a new file of some bytes."""


class FileCopier:
    """plugin_api's HostCopier on memory-mapped files in place of host memory.

    Every new copy on the "host" is a file of its own, without a name: the system deletes it with
    its tensor, however the process ends. Its pages are written to the disk and leave memory as soon
    as they are copied, in either direction. Copies are complete when the calls return.

    Args:
        folder: Existing folder, on a disk: a file system in memory (tmpfs) saves nothing.
        refusal: Default: the error itself.
    """

    def __init__(self, folder: str, refusal: Refusal | None = None) -> None:
        self._folder = folder
        self._refusal = refusal

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy to a new file, or to the file of ``out``.

        Raises:
            OSError: The disk is full, or the folder cannot be written to; or its ``refusal``.
        """
        source = tensor.detach().contiguous()
        if out is not None:
            _copy(_bytes(source), _bytes(out), mapped=out)
            return out
        with _new_file(self._folder, source.nbytes, self._refusal) as descriptor:
            host = _mapped(descriptor, source.numel(), source.dtype)
            _copy(_bytes(source), _bytes(host), mapped=host)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # starts writing to the disk
        return host.view(source.shape)

    def wait_host(self) -> None:
        """Do nothing: no copy is pending."""

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Copy from the file of ``host`` to a contiguous ``out``."""
        _copy(_bytes(host), _bytes(out.detach()), mapped=host)

    def wait_device(self) -> None:
        """Do nothing: no copy is pending."""


def mapped_file(
    folder: str, shape: Sequence[int], dtype: torch.dtype, refusal: Refusal | None = None
) -> Tensor:
    """Return zeros in a new memory-mapped file without a name; at least one element.

    Raises:
        OSError: The disk is full, or the folder cannot be written to; or its ``refusal``.
    """
    numel = math.prod(shape)
    with _new_file(folder, numel * dtype.itemsize, refusal) as descriptor:
        return _mapped(descriptor, numel, dtype).view(*shape)


def unload(mapped: Tensor) -> None:
    """Remove a tensor of a memory-mapped file from memory until it is used again."""
    _unload(mapped.data_ptr(), mapped.nbytes)


@contextmanager
def _new_file(folder: str, nbytes: int, refusal: Refusal | None) -> Iterator[int]:
    """Give the descriptor of a file, which the system deletes when nothing has it any more."""
    with ExitStack() as opened:
        try:
            file = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            # Reserved here, since a full disk would kill the process when it writes to the mapping.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if refusal is None:
                raise
            raise refusal(error, nbytes) from error
        yield file.fileno()


def _mapped(descriptor: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=numel, dtype=dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _copy(source: Tensor, target: Tensor, *, mapped: Tensor) -> None:
    """Copy bytes chunk by chunk; of the one that is mapped, no more than a chunk is in memory."""
    for start in range(0, len(source), _CHUNK):
        part = slice(start, start + _CHUNK)
        target[part].copy_(source[part])
        _unload(mapped.data_ptr() + start, len(source[part]))


def _unload(address: int, nbytes: int) -> None:
    """Remove pages of a shared mapping from memory; what was written to them is in the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
