"""Swapping to files: what stays in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ascend_run.plugins.memory.swap_attention import SwapAttention, SwapAttentionConfig
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.support.state_jobs import without_room

from .toy import swap

FOLDER = "plugins.swap-attention.folder"
NUM_LAYERS = 3
SIZE = 36 * 2**20
"""Bytes; glibc returns such blocks to the system as soon as they are freed."""


class Exponentials(nn.Module):
    """Each saves its output only."""

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(self.One() for _ in range(NUM_LAYERS))


def resident_bytes() -> int:
    """Memory of this process: its own, and pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def forward_and_gradient(config: SwapAttentionConfig | None) -> tuple[int, Tensor]:
    """Return what the forward adds to the memory at most, in sizes of a saved tensor, and the
    gradient."""
    layers = Exponentials()
    if config is not None:
        swap(SwapAttention(config), layers, CpuDevice())
    x = leaf = torch.linspace(-1, 0, SIZE // 4, requires_grad=True)
    before, most = resident_bytes(), 0
    for layer in layers.attention:
        x = layer(x)
        most = max(most, resident_bytes() - before)
    x.sum().backward()
    assert leaf.grad is not None
    return round(most / SIZE), leaf.grad


def test_only_tensors_in_files_take_no_memory(tmp_path: Path) -> None:
    plain, expected = forward_and_gradient(None)
    in_memory, _ = forward_and_gradient(SwapAttentionConfig())
    in_files, gradient = forward_and_gradient(SwapAttentionConfig(folder=str(tmp_path)))
    assert plain == NUM_LAYERS
    assert in_memory == NUM_LAYERS + 1  # the last output, and copies of all
    assert in_files == 1
    assert torch.equal(gradient, expected)
    assert not any(tmp_path.iterdir())


def test_no_bit_changes_if_tensors_go_to_files(parity: Parity, tmp_path: Path) -> None:
    options = {
        "platform": "cpu",
        FOLDER: str(tmp_path),
        "plugins.swap-attention.min_bytes": 1,
    }
    (outcome,) = parity("swap-attention", options=options)
    assert outcome.metrics["swap-attention/swap_bytes"] > 0


def test_a_full_disk_is_an_error_of_the_user(gloo_pool: GlooPool, tmp_path: Path) -> None:
    options = {FOLDER: str(tmp_path), "plugins.swap-attention.min_bytes": 1}
    (error,) = gloo_pool.run(without_room, 1, {**DENSE, **options}, ("swap-attention",))
    assert f"swap-attention: {FOLDER}={tmp_path}: no file of" in error
    assert "bytes: No space left on device; name a folder on a disk with room for all" in error
