"""The comparisons' Llamas: their arithmetic by hand, and that every system trains the same one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks import end_to_end_worker, llama, peer_weights
from benchmarks.end_to_end import LOSS_TOLERANCE
from benchmarks.our_run import training

TINY = llama.SHAPES["tiny"]
STEPS = 4


def our_losses(enable: list[str]) -> list[float]:
    """On a rank of the pool."""
    with training(TINY, "fp32", "cpu", enable) as step:
        return [step(index) for index in range(STEPS)]


def answer_of(system: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["--system", system, "--dtype", "fp32", "--shape", "tiny", "--device", "cpu"]
    threads = torch.get_num_threads()
    end_to_end_worker.main(
        [*words, "--warmup", "1", "--steps", str(STEPS - 1), "--threads", str(threads)]
    )
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_ours_and_transformers_train_the_same_model(
    gloo_pool: GlooPool, capsys: pytest.CaptureFixture[str]
) -> None:
    [ours] = gloo_pool.run(our_losses, 1, [])
    result = answer_of("transformers", capsys)
    assert len({f"{loss:.4f}" for loss in ours}) == STEPS  # they move, so weights are compared too
    assert ours == pytest.approx(result["losses"], rel=LOSS_TOLERANCE["fp32"] / 10)
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 2**20
    assert result["device"] is None


def test_the_peers_have_the_same_weights_each_under_its_own_names() -> None:
    litgpt, hugging = peer_weights.litgpt_weights(TINY), peer_weights.transformers_weights(TINY)
    parts = [hugging[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(litgpt["transformer.h.1.attn.qkv.weight"], torch.cat(parts))
    for state in (litgpt, hugging, llama.weights(TINY)):
        assert sum(tensor.numel() for tensor in state.values()) == TINY.num_parameters()


def test_parameters_are_those_that_the_text_promises() -> None:
    # 2 x 16384 x 512 + 6 (4 x 512^2 + 3 x 512 x 1408 + 2 x 512) + 512
    assert llama.SHAPES["36m"].num_parameters() == 36_051_456
    # 2 x 32000 x 2048 + 24 (4 x 2048^2 + 3 x 2048 x 5504 + 2 x 2048) + 2048
    assert llama.SHAPES["1.3b"].num_parameters() == 1_345_423_360


def test_flops_follow_both_conventions() -> None:
    shape = llama.Shape(
        layers=2, hidden=8, ffn=16, heads=2, vocab=100, seq_length=10, micro_batch=3
    )
    # N = 2 x 100 x 8 + 2 (4 x 64 + 3 x 128 + 16) + 8 = 2920; V h = 800; L S h = 160
    assert shape.num_parameters() == 2920
    assert shape.flops_per_token() == 6 * (2920 - 800) + 6 * 160
    assert shape.flops_per_token(causal=False) == 6 * 2920 + 12 * 160
    assert shape.tokens == 30
