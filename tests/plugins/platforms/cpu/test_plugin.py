"""The plugin's declaration, and what its hooks return."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from ascend_run.plugin_api import AttentionFeatures, Claim, Support
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.platforms.cpu import Cpu
from ascend_run.plugins.platforms.cpu.operators import platform_ops
from ascend_run.plugins.platforms.cpu.options import CpuOptions

IMPORT_ALONE = "import sys, ascend_run.plugins.platforms.cpu; sys.exit('torch' in sys.modules)"


def test_importing_the_plugin_imports_no_torch() -> None:
    assert subprocess.run([sys.executable, "-c", IMPORT_ALONE], timeout=60).returncode == 0


def test_the_entry_point_names_the_platform() -> None:
    (entry,) = entry_points(group="ascend_run.platforms", name="cpu")
    assert entry.load() is Cpu
    assert claims_of(Cpu) == (Claim.PLATFORM,)
    assert Cpu.manifest.platforms == {"cpu": Support.REAL}


def test_the_kernel_declares_every_feature_of_the_contract() -> None:
    features = Cpu(CpuOptions()).ascend_attention_kernel(ops=platform_ops()).features
    assert all(getattr(features, field) for field in AttentionFeatures.__annotations__)


def test_the_cores_are_shared_among_ranks_unless_the_user_has_said_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(ranks: int) -> str | None:
        return Cpu(CpuOptions()).ascend_environment(ranks).get("OMP_NUM_THREADS")

    assert [threads(ranks) for ranks in (1, cores * 4)] == [None, "1"]
    assert cores == 1 or threads(cores) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(2) is None


def test_every_operator_has_a_form_and_runs() -> None:
    ops = platform_ops()
    x, weight = torch.randn(3, 2, 8), torch.ones(8)
    assert ops.rms_norm(x, weight, 1e-5).shape == (3, 2, 8)
    assert ops.layer_norm(x, weight, None, 1e-5).shape == (3, 2, 8)
    assert ops.swiglu(x).shape == (3, 2, 4)
    tables = torch.randn(2, 3, 4)
    assert ops.rotary(x.view(3, 2, 2, 4), *tables, False).shape == (3, 2, 2, 4)
