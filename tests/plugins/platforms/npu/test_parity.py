"""A full run with the NPU's kernels, on the reference operators, against the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from tests.support.chats import CHATML, write_lines, write_tokenizer

from .kernels_on_cpu import NpuKernels

LAYERS, MICRO_BATCHES = 2, 4


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with offered(NpuKernels):
        yield


@pytest.mark.exhaustive(by=lambda model: [model] if model == "moe" else [])
@pytest.mark.parametrize(
    ("model", "beside", "layout"),
    [
        ("dense", (), {}),
        ("moe", (), {"dp": 2, "ep": 2}),
        ("dense", (), {"tp": 2}),
        pytest.param("dense", ("ulysses",), {"cp": 2}, marks=pytest.mark.needs_plugins("ulysses")),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_the_cpu(
    parity: Parity, model: str, beside: tuple[str, ...], layout: dict[str, int]
) -> None:
    for outcome in parity("npu-kernels", model=model, beside=beside, layout=layout):
        calls = outcome.operations
        assert calls["npu_fusion_attention"] == LAYERS * MICRO_BATCHES // layout.get("dp", 1)
        assert calls["npu_fusion_attention_grad"] == calls["npu_fusion_attention"]
        norms = (2 * LAYERS + 1) * MICRO_BATCHES // layout.get("dp", 1)
        assert calls["npu_rms_norm"] == calls["npu_rms_norm_backward"] == norms
        assert calls["npu_rotary_mul"] > 0
        assert calls["npu_swiglu"] == calls.get("npu_swiglu_backward", 0)


@pytest.mark.needs_plugins("gmm")
def test_experts_are_products_of_its_own(parity: Parity) -> None:
    """If experts are grouped; two forward and four backward."""
    for outcome in parity("npu-kernels", model="moe", beside=("gmm",), layout={"dp": 2, "ep": 2}):
        assert outcome.operations["npu_grouped_matmul"] == 6 * LAYERS * MICRO_BATCHES // 2


def test_other_models_are_kept_too(parity: Parity) -> None:
    parity("npu-kernels", config={"model.rotary_interleaved": True, "model.rotary_percent": 0.5})
    parity("npu-kernels", config={"model.window_size": [4, 0], "model.qk_layernorm": True})


@pytest.mark.needs_plugins("ring-attention", "sft")
def test_a_mask_of_every_pair_is_the_operators_in_a_ring(parity: Parity, tmp_path: Path) -> None:
    """There a block masks every key of most queries."""
    turns = [{"role": role, "content": f"{role} one"} for role in ("user", "assistant")]
    config = {
        "task": "sft",
        "model.vocab_size": 1000,
        "data.train": [write_lines(tmp_path / "train.jsonl", [{"messages": turns}])],
        "data.tokenizer": str(write_tokenizer(tmp_path / "tokenizer", CHATML)),
        "plugins.sft.bidirectional_prompt": True,
    }
    beside = ("ring-attention",)
    for outcome in parity("npu-kernels", beside=beside, layout={"cp": 2}, config=config):
        calls = outcome.operations
        assert calls["npu_fusion_attention"] == calls["npu_fusion_attention_grad"] > 0
