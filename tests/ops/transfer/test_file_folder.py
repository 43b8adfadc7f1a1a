"""What the folder of memory-mapped files must be."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from ascend_run.ops.transfer.file_folder import problems_of_folder, why_nothing_is_saved

OPTION = "plugins.some.folder"


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


def mounted(monkeypatch: pytest.MonkeyPatch, **kinds: str) -> None:
    """Have these file systems alone: by their folders, with ``_`` for ``/``."""
    mounts = [Mount(folder.replace("_", "/"), kind) for folder, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/fast/a", "tmpfs"),
        ("/fast", "tmpfs"),
        ("/fast/disk/a", ""),
        ("/faster", ""),
        ("/fast/disk/ram", "ramfs"),
        ("/fast/../else", ""),
    ],
)
def test_the_innermost_file_system_counts(
    monkeypatch: pytest.MonkeyPatch, folder: str, kind: str
) -> None:
    mounted(monkeypatch, _="ext4", _fast="tmpfs", _fast_disk="xfs", _fast_disk_ram="ramfs")
    why = why_nothing_is_saved("cpu", OPTION, folder)
    assert (f"the files of {OPTION}={folder} are in memory ({kind})" in why) is bool(kind)
    assert bool(why) is bool(kind)


def test_of_two_file_systems_in_one_folder_the_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [Mount("/", "ext4"), Mount("/a", "tmpfs"), Mount("/a", "xfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert why_nothing_is_saved("cpu", OPTION, "/a") == ""
    mounts.reverse()
    assert "in memory (tmpfs)" in why_nothing_is_saved("cpu", OPTION, "/a")


def test_without_a_folder_the_host_saves_nothing_on_the_cpu_alone() -> None:
    assert why_nothing_is_saved("cpu", OPTION).endswith(f"; set {OPTION} to a folder on a disk")
    assert why_nothing_is_saved("cpu").endswith("the device's on platform cpu")
    assert why_nothing_is_saved("cuda", OPTION) == why_nothing_is_saved("npu") == ""


def test_a_folder_is_tried_on_the_cpu_alone(tmp_path: Path) -> None:
    assert [*problems_of_folder("some", None, "cuda")] == []
    assert [*problems_of_folder("some", str(tmp_path), "cpu")] == []
    (problem,) = problems_of_folder("some", "/proc", "cuda")
    assert problem == f"some: {OPTION}=/proc is for platform cpu, not cuda; leave it out"
