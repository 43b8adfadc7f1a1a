"""The platform without a GPU: its declarations, its operators, and a run that is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied_patches
from ascend_run.plugin_api import PlatformError
from ascend_run.plugins.platforms import transformer_engine_patches
from ascend_run.plugins.platforms.cuda import Cuda
from ascend_run.plugins.platforms.cuda.device import CudaDevice
from ascend_run.plugins.platforms.cuda.platform_ops import platform_ops
from ascend_run.prepare.prepare import prepare
from tests.core.train.runs import write_tokens
from tests.support.forked import forked_command

RUN = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
       "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
       "data.seq_length=16"]  # fmt: skip
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_run_is_planned_without_the_device() -> None:
    assert prepare(None, RUN, platform="cuda").config.platform == "cuda"


def test_a_rank_without_a_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlatformError, match="rank 2 of this machine has no GPU; torch sees 2"):
        CudaDevice(2)
    assert CudaDevice(1).torch_device == torch.device("cuda", 1)


def test_a_pool_is_torchs_own_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda **options: ("a pool", options))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *given: entered.append(given))
    pool = CudaDevice(1).memory_pool()
    pool()
    pool()
    assert entered == [(("a pool", {"use_on_oom": True}), torch.device("cuda", 1))] * 2


@NO_GPU
def test_a_run_without_a_gpu_ends_with_one_message(tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "train", 64, 10, seed=1)
    words = [*RUN[:1], f"data.train={data}", *RUN[2:], f"run.output_dir={tmp_path / 'run'}"]
    process = forked_command(tmp_path, "train", "--platform", "cuda", *words)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2, errors
    assert errors.count("has no GPU") == 1
    assert "Traceback" not in errors


def test_norms_follow_the_formula() -> None:
    ops = platform_ops()
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 2, 8), (8,), (8,))
    )
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), rms, rtol=0, atol=1e-12)
    centred = x - x.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), layer, rtol=0, atol=1e-12)


def test_what_megatron_asks_of_an_absent_transformer_engine_is_patched() -> None:
    targets = {patch.target.partition(":")[2] for patch in transformer_engine_patches()}
    assert targets == {"_te_version", "_fa_version", "te_general_gemm"}


def test_the_patches_fit_a_megatron_without_transformer_engine() -> None:
    """It lacks what one of the patches targets."""
    with applied_patches(Hooks([Cuda()])):
        from megatron.core.transformer.moe import moe_utils

        assert moe_utils.te_general_gemm is None
    assert not hasattr(moe_utils, "te_general_gemm")
