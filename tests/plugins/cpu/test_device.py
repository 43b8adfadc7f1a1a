"""The device: activation that leaves no trace, copies, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_run.plugins.cpu.device import CpuDevice, SynchronousCopier
from ascend_run.plugins.cpu.facade import facade_table
from ascend_run.plugins.cpu.facade.substitution import Substitute, Substitutions, locate


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.deactivate()


def names_in_place(device: CpuDevice) -> dict[str, Any]:
    """What every name of the table stands for; None where its owner does not hold it itself."""
    owned = {row.target: locate(row.target) for row in facade_table(device)}
    return {target: vars(owner).get(name) for target, (owner, name) in owned.items()}


def test_deactivating_puts_back_the_very_objects(device: CpuDevice) -> None:
    before = names_in_place(device)
    device.activate()
    during = names_in_place(device)
    device.deactivate()
    after = names_in_place(device)
    unchanged = [name for name in before if during[name] is before[name]]
    # Megatron has no such names where the accelerator's packages are missing, so None is None.
    assert unchanged == ["megatron.core.transformer.moe.moe_utils:te_general_gemm"]
    assert [name for name in before if after[name] is not before[name]] == []


def test_activating_twice_is_activating_once(device: CpuDevice) -> None:
    before = names_in_place(device)
    device.activate()
    device.activate()
    device.deactivate()
    assert all(value is before[name] for name, value in names_in_place(device).items())


def test_deactivating_an_idle_device_changes_nothing(device: CpuDevice) -> None:
    device.deactivate()
    assert not torch.zeros(1).is_cuda


def test_a_row_that_fails_takes_the_whole_table_back() -> None:
    rows = [
        Substitute("math:pi", 3, "the first row is set"),
        Substitute("builtins:int.real", 4, "a built-in class refuses"),
    ]
    import math

    with pytest.raises(TypeError):
        Substitutions(rows).install()
    assert math.pi > 3


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


def test_the_peak_is_kept_until_it_is_reset(device: CpuDevice) -> None:
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
