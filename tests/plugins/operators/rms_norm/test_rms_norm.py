"""RMSNorm by each kernel against the run without the plugin, forward and every gradient."""

from __future__ import annotations

import os

import pytest

from ascend_run.ops.kernels.operator_kernels import PLATFORMS_OWN, choose
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugins.operators.rms_norm import RmsNorm
from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from ascend_run.testing.runtime import PLATFORM_VARIABLE, RankOutcome
from tests.plugins.platforms.npu.kernels_on_cpu import NpuKernels
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
NORMS = (2 * LAYERS + 1) * MICRO_BATCHES
PLATFORMS, PLAIN = "rsqrt_", "rsqrt"
"""The reciprocal square root: the CPU's own kernel calls it in place, the plain formula does not,
and a compiled one shows neither."""


def roots(outcome: RankOutcome) -> dict[str, int]:
    return {name: outcome.operations.get(name, 0) for name in (PLATFORMS, PLAIN)}


COUNTS = {
    PLATFORMS_OWN: {PLATFORMS: NORMS, PLAIN: 0},
    "torch": {PLATFORMS: 0, PLAIN: NORMS},
    "compile": {PLATFORMS: 0, PLAIN: 0},
    "liger": {PLATFORMS: 0, PLAIN: NORMS},  # leaves float64 to torch
}


@pytest.mark.parametrize("kernel", ["auto", "torch", "compile"])
def test_it_keeps_loss_gradients_and_weights(parity: Parity, kernel: str) -> None:
    (outcome,) = parity("rms-norm", options={"plugins.rms-norm.kernel": kernel})
    form = choose("rms_norm", kernel, os.environ.get(PLATFORM_VARIABLE, "cpu"))
    assert roots(outcome) == COUNTS[form]


@pytest.mark.exhaustive(by=lambda beside: ["beside"] if beside else [])
@pytest.mark.parametrize(
    ("beside", "model", "layout"),
    [
        ((), "dense", {"tp": 2}),
        case(("lora", "swap-attention"), "dense", {"dp": 2}),
        case(("ulysses", "gmm", "deterministic"), "moe", {"cp": 2}),
    ],
    ids=str,
)
def test_the_plain_formula_goes_with_other_plugins_and_layouts(
    parity: Parity, beside: tuple[str, ...], model: str, layout: dict[str, int]
) -> None:
    options = {"plugins.rms-norm.kernel": "torch", "plugins.swap-attention.min_bytes": 1}
    outcomes = parity("rms-norm", beside=beside, model=model, layout=layout, options=options)
    for outcome in outcomes:
        assert roots(outcome)[PLATFORMS] == 0
        assert roots(outcome)[PLAIN] > 0


def test_norms_of_heads_are_its_too(parity: Parity) -> None:
    config = {"model.qk_layernorm": True, "model.layernorm_zero_centered_gamma": True}
    (outcome,) = parity("rms-norm", config=config, options={"plugins.rms-norm.kernel": "torch"})
    assert roots(outcome) == {PLATFORMS: 0, PLAIN: NORMS + 2 * LAYERS * MICRO_BATCHES}


@pytest.mark.parametrize(("kernel", "calls"), [("auto", NORMS), ("torch", 0)])
def test_on_the_npu_it_is_the_operator_of_the_npu(parity: Parity, kernel: str, calls: int) -> None:
    with offered(NpuKernels):
        options = {"plugins.rms-norm.kernel": kernel}
        (outcome,) = parity("rms-norm", beside=("npu-kernels",), options=options)
    assert outcome.operations.get("npu_rms_norm", 0) == calls
    assert outcome.operations.get("npu_rms_norm_backward", 0) == calls


def test_it_says_what_it_is_and_is_idle_without_such_norms() -> None:
    assert RmsNorm.manifest.numerics is Numerics.ROUNDING
    assert RmsNorm.manifest.level == 1
    for normalization, idle in (("RMSNorm", set()), ("LayerNorm", {"rms-norm"})):
        plan = planned_with("rms-norm", f"model.normalization={normalization}").plan
        assert {*plan.idle} == idle


def test_a_kernel_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(AscendRunError, match=r"rms-norm\.kernel=liger is for platform cuda"):
        planned_with("rms-norm", "plugins.rms-norm.kernel=liger")
    with pytest.raises(AscendRunError, match="fast"):
        planned_with("rms-norm", "plugins.rms-norm.kernel=fast")
