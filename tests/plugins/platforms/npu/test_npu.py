"""The platform without its device: its declarations, and how its device object uses torch.npu."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ascend_run.plugin_api import PlatformError
from ascend_run.plugins.platforms.npu.device import NpuDevice
from ascend_run.prepare.prepare import prepare
from tests.core.train.runs import write_tokens
from tests.support.fake_streams import FakeStreams
from tests.support.forked import forked_command

RUN = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
       "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
       "data.seq_length=16"]  # fmt: skip


def test_a_missing_torch_npu_is_reported_with_the_remedy() -> None:
    with pytest.raises(PlatformError, match=r"torch_npu is not installed.*ascend-run\[npu\]"):
        NpuDevice(0)


def test_a_run_is_planned_without_the_device() -> None:
    assert prepare(None, RUN, platform="npu").config.platform == "npu"


def test_dropout_and_a_bias_of_positions_are_planned() -> None:
    run = [*RUN, "model.attention_dropout=0.1", "model.window_size=[4,0]"]
    assert prepare(None, run, platform="npu").config.model.attention_dropout == 0.1


def test_a_run_without_torch_npu_ends_with_one_message(tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "train", 64, 10, seed=1)
    words = [*RUN[:1], f"data.train={data}", *RUN[2:], f"run.output_dir={tmp_path / 'run'}"]
    process = forked_command(tmp_path, "train", "--platform", "npu", *words)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2, errors
    assert errors.count("torch_npu is not installed") == 1
    assert "Traceback" not in errors


class FakeNpu(FakeStreams):
    """The part of ``torch.npu`` that the device uses, with one device."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        self.current = device

    def memory_allocated(self, device: Any) -> int:
        return 3

    def max_memory_allocated(self, device: Any) -> int:
        return 5


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    for name in ("torch_npu", "torch_npu.contrib", "torch_npu.contrib.transfer_to_npu"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch, "device", lambda kind, index: (kind, index))
    return fake


def test_a_rank_takes_the_device_of_its_number(npu: FakeNpu) -> None:
    device = NpuDevice(0)
    device.activate()
    assert npu.current == device.torch_device == ("npu", 0)
    assert (device.name, device.backend) == ("npu", "hccl")
    assert device.memory_bytes() == (3, 5)
    device.deactivate()


def test_a_rank_without_a_device_is_reported(npu: FakeNpu) -> None:
    with pytest.raises(PlatformError, match="rank 1 of this machine has no NPU; torch_npu sees 1"):
        NpuDevice(1)
