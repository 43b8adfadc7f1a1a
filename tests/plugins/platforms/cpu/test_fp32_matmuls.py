"""The library of float32 matmuls: chosen by given times, and at work in a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.plugins.platforms.cpu import Cpu
from ascend_run.plugins.platforms.cpu.kept_times import Times
from ascend_run.plugins.platforms.cpu.options import FP32_MATMUL_LIBRARY, VARIABLES, CpuOptions
from ascend_run.plugins.platforms.cpu.timed_choices import FP32_LINEARS, Work, agreed_choice
from ascend_run.plugins.platforms.cpu.work_times import library_times
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import TRIAL_SECONDS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_configs import config_with

OPTION = "plugins.cpu.fp32_matmul_library"
TP = {"parallel.tensor_model_parallel_size": 2}
LONG = {"data.seq_length": 64}


@pytest.mark.parametrize(("other", "library"), [(0.5, "onednn"), (0.95, "torch"), (2.0, "torch")])
def test_the_faster_library_is_chosen_and_its_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: float, library: str
) -> None:
    monkeypatch.delenv(FP32_MATMUL_LIBRARY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = (FP32_LINEARS.names, FP32_LINEARS.kind, FP32_LINEARS.variable)
    for times in (Times(usual=1.0, other=other), Times(usual=9.0, other=9.0)):
        work = Work(FP32_LINEARS.option, lambda times=times: times, *names)
        assert agreed_choice("auto", work) == library


def test_both_libraries_are_timed() -> None:
    assert min(library_times().usual, library_times().other) > 0


@pytest.mark.parametrize(
    ("option", "variable", "library"),
    [("auto", "onednn", "onednn"), ("auto", "torch", "torch"), ("onednn", "torch", "onednn")],
)
def test_a_fp32_run_names_its_library(
    monkeypatch: pytest.MonkeyPatch, option: str, variable: str, library: str
) -> None:
    monkeypatch.setenv(FP32_MATMUL_LIBRARY, variable)
    cpu, config = Cpu(CpuOptions(fp32_matmul_library=option)), config_with(train__precision="fp32")
    assert cpu.ascend_machine_choices(config) == {OPTION: library}
    assert (cpu.ascend_platform_ops(config).matmul is None) is (library == "torch")


def test_each_variable_of_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "mkl")
    first, second = Cpu(CpuOptions()).ascend_check()
    assert "expected bf16 or fp32" in first
    assert f"{FP32_MATMUL_LIBRARY}='mkl'; expected torch or onednn" in second


@pytest.mark.exhaustive(by=lambda plugins: ())
@pytest.mark.parametrize(
    ("plugins", "model", "layout"),
    [
        ((), DENSE, {}),
        ((), DENSE, {**TP, "parallel.sequence_parallel": True}),
        case(("lora",), DENSE, {"plugins.lora.export": False}),
        case(("mc2",), DENSE, {**TP, "parallel.sequence_parallel": True}),
        case(("coc",), DENSE, TP),
        case(("gmm",), MOE, {}),
    ],
    ids=str,
)
def test_a_model_is_as_near_to_float64_as_with_torchs_matmuls(
    gloo_pool: GlooPool, plugins: tuple[str, ...], model: dict[str, Any], layout: dict[str, Any]
) -> None:
    ranks, calls = 2 if TP.items() <= layout.items() else 1, {}

    def gradients(dtype: str, library: str) -> dict[str, torch.Tensor]:
        config = {**model, **layout, **LONG, OPTION: library, "platform": "cpu"}
        trial = Trial(plugins=plugins, config=config, dtype=dtype)
        outcome = gloo_pool.run(run_trial, ranks, trial, timeout=TRIAL_SECONDS)[0]
        calls[dtype, library] = outcome.operations.get("_linear_pointwise", 0)
        return {p.name: p.tensor.double() for p in outcome.shards if p.tensor is not None}

    exact = gradients("float64", "onednn")
    plain, other = gradients("float32", "torch"), gradients("float32", "onednn")

    def error(found: dict[str, torch.Tensor]) -> float:
        """Return the relative error over all tensors."""
        apart = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        return (apart / sum(float(tensor.square().sum()) for tensor in exact.values())) ** 0.5

    assert exact.keys() == plain.keys() == other.keys()
    assert 0 < error(other) <= 2 * error(plain) < 1e-5
    assert calls["float64", "onednn"] == calls["float32", "torch"] == 0
    assert calls["float32", "onednn"] > 0


@pytest.mark.parametrize(
    ("library", "precision", "counted"),
    [("onednn", "fp32", True), ("auto", "fp32", False), ("onednn", "bf16", False)],
)
def test_a_block_of_logits_is_counted_where_it_is_sure(
    library: str, precision: str, counted: bool
) -> None:
    long = {"data.seq_length": 256, "model.vocab_size": 4096, "train.precision": precision}
    (plain,) = planned({**DENSE, **long, OPTION: "torch"})[1]
    (cost,) = planned({**DENSE, **long, OPTION: library})[1]
    assert (cost.memory.peak > plain.memory.peak) is counted
