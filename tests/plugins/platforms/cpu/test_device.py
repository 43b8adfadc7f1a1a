"""The device: copies, memory."""

from __future__ import annotations

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


def test_the_peak_is_kept_until_it_is_reset() -> None:
    device = CpuDevice()
    now, peak = device.memory_bytes()
    assert peak == now > 10 * 2**20
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    grown, _ = device.memory_bytes()
    assert grown >= now + held.numel() // 2
    del held
    assert device.memory_bytes()[1] >= grown
    device.reset_peak_memory()
    current, peak = device.memory_bytes()
    assert peak == current < grown
