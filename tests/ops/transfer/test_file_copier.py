"""Copies to memory-mapped files: the bytes, and what they leave in memory and in the folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from ascend_run.ops.transfer import file_copier
from ascend_run.ops.transfer.file_copier import FileCopier


def num_mapped_files(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_bytes_come_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(file_copier, "_CHUNK", 4096)  # several, the last one shorter
    copier = FileCopier(str(tmp_path))
    source = torch.randint(0, 100, (50, 97)).to(dtype).t()
    host = copier.to_host(source)
    copier.wait_host()
    assert torch.equal(host, source)
    out = torch.zeros(97, 50, dtype=dtype)
    copier.to_device(host, out)
    copier.wait_device()
    assert torch.equal(out, source)
    assert torch.equal(host, source)


def test_files_have_no_names_and_go_with_their_tensors(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    hosts = [FileCopier(str(tmp_path)).to_host(torch.ones(1000)) for _ in range(3)]
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert num_mapped_files(tmp_path) == 3
    del hosts
    assert num_mapped_files(tmp_path) == 0


def test_a_later_copy_goes_to_the_same_file(tmp_path: Path) -> None:
    copier, out = FileCopier(str(tmp_path)), torch.zeros(1000)
    host = copier.to_host(torch.ones(1000))
    assert copier.to_host(torch.full((1000,), 2.0), host) is host
    copier.to_device(host, out)
    assert out.eq(2.0).all()
    assert num_mapped_files(tmp_path) == 1


def test_a_disk_without_room_is_an_error(tmp_path: Path) -> None:
    """Not a signal, which the first write to the mapping would raise."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            FileCopier(str(tmp_path)).to_host(torch.ones(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert num_mapped_files(tmp_path) == 0
