"""The device: copies, memory."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from ascend_run.plugins.platforms.cpu.device import CpuDevice, SynchronousCopier


def test_a_copy_to_the_host_shares_no_memory_and_comes_back() -> None:
    copier = SynchronousCopier()
    source = torch.randn(4, 6, requires_grad=True).t()
    host = copier.to_host(source)
    copier.wait_host()
    assert host.data_ptr() != source.data_ptr()
    assert host.is_contiguous()
    assert not host.requires_grad
    out = torch.zeros_like(source)
    copier.to_device(host, out)
    copier.wait_device()
    torch.testing.assert_close(out, source.detach(), rtol=0, atol=0)


@pytest.mark.exhaustive(by=lambda keeps: ())
@pytest.mark.parametrize("keeps", [True, False])
def test_freed_blocks_are_kept_or_go_back_to_the_system(keeps: bool) -> None:
    """Blocks of 4 MiB below one that stays; the first that is freed would raise the threshold."""
    program = (
        "import torch; from ascend_run.plugins.platforms.cpu.device import CpuDevice\n"
        f"device = CpuDevice(keeps_freed={keeps}); device.activate(); torch.ones(2**22)\n"
        "below = [torch.ones(2**20) for _ in range(16)]; stays = torch.ones(2**20)\n"
        "full, _ = device.memory_bytes(); below.clear(); print(full - device.memory_bytes()[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    freed = int(done.stdout)
    assert (freed < 2**20) if keeps else (freed > 60 * 2**20)


def test_the_peak_is_kept_until_it_is_reset() -> None:
    device = CpuDevice()
    now, peak = device.memory_bytes()
    assert peak == now > 10 * 2**20
    mapped = mmap.mmap(-1, 64 * 2**20)  # an allocation may lie where freed memory was kept
    torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
    grown, _ = device.memory_bytes()
    assert grown >= now + len(mapped) // 2
    mapped.close()
    assert device.memory_bytes()[1] >= grown
    device.reset_peak_memory()
    current, peak = device.memory_bytes()
    assert peak == current < grown
