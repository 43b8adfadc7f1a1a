"""Memory of the host: values, files, and what is left in the process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascend_run.ops.memory.host_mapped import FileMapped, HostMapped


def resident_bytes(mapped: Tensor) -> int:
    """Return the bytes of a mapping that are in the memory of the process."""
    text = Path("/proc/self/smaps").read_text()
    start = f"{mapped.data_ptr():x}-"
    _, _, own = text.partition(f"\n{start}")
    (size,) = re.findall(r"^Rss:\s+(\d+) kB$", own[: own.index("VmFlags")], re.MULTILINE)
    return int(size) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_operators_change_values_in_place(
    tmp_path: Path, dtype: torch.dtype, in_files: bool
) -> None:
    memory = FileMapped(str(tmp_path)) if in_files else HostMapped(torch.device("cpu"))
    values = torch.arange(15).view(3, 5).to(dtype)
    mapped = memory.empty(values.shape, dtype)
    assert (mapped.shape, mapped.dtype, mapped.is_contiguous()) == (values.shape, dtype, True)
    memory.write(mapped, values)
    mapped.add_(1)
    memory.rest([mapped])
    assert torch.equal(memory.read(mapped), values + 1)
    assert memory.every_operator


def test_files_at_rest_are_not_in_memory(tmp_path: Path) -> None:
    memory = FileMapped(str(tmp_path))
    mapped = memory.empty((1000, 1024), torch.float32)
    mapped.fill_(3.0)
    assert resident_bytes(mapped) == mapped.nbytes
    memory.rest([mapped])
    assert resident_bytes(mapped) == 0
    assert mapped.eq(3.0).all()
    assert [*tmp_path.iterdir()] == []
