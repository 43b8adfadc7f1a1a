"""The device object on the fake NPU: its calls of torch.npu, and copies overlapped with
computation."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ascend_run.plugin_api import CommOptions, PlatformError
from ascend_run.plugins.platforms.npu import Npu, communicators
from ascend_run.plugins.platforms.npu.proof.releases import releases

from .stand_in import npu_on_the_cpu


def test_the_device_belongs_to_the_rank_and_reports_its_memory() -> None:
    with npu_on_the_cpu(count=2) as seen:
        device = Npu().ascend_device(local_rank=1)
        device.activate()
        assert device.memory_bytes() == (4096, 8192)
        device.reset_peak_memory()
        assert device.memory_bytes() == (4096, 4096)
        device.synchronize()
        assert torch.cuda.memory_allocated() == 4096, "torch.cuda means the NPU"
        device.deactivate()
    assert (device.name, device.backend, seen.devices) == ("npu", "hccl", ["npu:1"])
    assert seen.calls["set_device"] == seen.calls["synchronize"] == 1
    assert not hasattr(torch, "npu"), "the stand-in is gone"


def test_a_communicators_buffer_is_an_option_of_hccl() -> None:
    with npu_on_the_cpu():
        options = Npu().ascend_device(local_rank=0).group_options(CommOptions(buffer_mb=64))
    assert options.hccl_config == {"hccl_buffer_size": 64}


def test_copies_to_the_host_are_complete_only_after_a_wait() -> None:
    with npu_on_the_cpu(count=1) as seen:
        copier = Npu().ascend_device(local_rank=0).host_copier()
        tensor = torch.arange(4.0)
        host = copier.to_host(tensor).fill_(-1)
        assert host.tolist() == [-1.0] * 4
        copier.wait_host()
        assert host.tolist() == tensor.tolist()
        back = torch.zeros(4)
        copier.to_device(host, back)
        assert back.tolist() == [0.0] * 4
        copier.wait_device()
        assert back.tolist() == tensor.tolist()
    assert seen.pinned == 1


def test_a_pool_is_created_once_and_entered_each_time() -> None:
    with npu_on_the_cpu() as seen:
        pool = Npu().ascend_device(local_rank=0).memory_pool()
        assert pool is not None
        for _ in range(2):
            with pool():
                assert seen.calls["MemPool"] == 1
    assert seen.calls["use_mem_pool"] == 2


def test_a_torch_npu_that_is_too_old_is_refused() -> None:
    with (
        npu_on_the_cpu(version="2.6.0.post5"),
        pytest.raises(PlatformError, match=r"torch_npu 2\.6\.0\.post5 is too old.*>=2\.7"),
    ):
        Npu().ascend_device(local_rank=0)


def test_every_release_that_is_recorded_is_young_enough() -> None:
    for release in releases().names:
        with npu_on_the_cpu(version=release):
            Npu().ascend_device(local_rank=0)


def test_a_communicator_has_the_name_that_hccl_gives_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank among all ranks, not its index in the group."""
    hccl, group = mock.Mock(), mock.Mock()
    hccl.get_hccl_comm_name.side_effect = "hccl of rank {}".format
    group._get_backend.side_effect = {"npu:0": hccl}.__getitem__
    monkeypatch.setattr(communicators.dist, "get_rank", lambda: 5)
    monkeypatch.setattr(communicators, "torch", mock.Mock(device="{}:0".format))
    assert communicators.communicator_name(group) == "hccl of rank 5"
