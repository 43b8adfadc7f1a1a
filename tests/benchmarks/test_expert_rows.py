"""The rows of experts: speed counts only where both computed the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks import (
    dispatch,
    dispatch_worker,
    end_to_end_worker,
    expert_mlps,
    expert_mlps_worker,
    expert_steps,
    llama,
    peer_weights,
    ring_worker,
)
from benchmarks.end_to_end import LOSS_TOLERANCE
from benchmarks.our_run import training
from benchmarks.protocol import Settings
from tests.support.forked import Forked, printed_by

TINY = llama.SHAPES["tiny-experts"]
STEPS = 3


@pytest.mark.parametrize(("difference", "met"), [(0.0, True), (0.1, False), (math.nan, False)])
def test_mlps_count_only_if_their_results_are_equal(
    monkeypatch: pytest.MonkeyPatch, difference: float, met: bool
) -> None:
    def result(module: str, *words: str, **_: Any) -> dict[str, Any]:
        assert (module, words[words.index("--pairs") + 1]) == ("expert_mlps_worker", "2")
        times = {"ours": [1.0, 1.0], "peer": [2.6, 2.6]}
        return {**times, "difference": difference, "fewest": 1, "most": 2}

    monkeypatch.setattr(expert_mlps, "worker", result)
    for benchmark in expert_mlps.benchmarks():
        row = benchmark.measure(Settings(pairs=2))
        assert (row.goal, row.ratio, row.met) == (benchmark.goal, 2.6, met)


def test_goals_of_mlps_depend_on_dtype_and_balance() -> None:
    goals = {
        benchmark.name.partition("'")[0::2]: benchmark.goal
        for benchmark in expert_mlps.benchmarks()
    }
    assert len(goals) == 12
    for (experts, name), goal in goals.items():
        if "fp32" in name:
            assert goal == ">= 0.95 x"
        else:
            is_largest = experts == "64 experts" and "balanced" in name
            assert goal == (">= 2.5 x" if is_largest else ">= 1.3 x")


@pytest.mark.parametrize(("difference", "met"), [(0.0, True), (0.1, False), (math.nan, False)])
def test_dispatch_counts_only_if_the_results_are_equal(
    monkeypatch: pytest.MonkeyPatch, difference: float, met: bool
) -> None:
    def result(module: str, *words: str) -> dict[str, Any]:
        assert (module, words[words.index("--steps") + 1]) == ("dispatch_worker", "8")
        seconds = [*[1.0] * 8, *[1.3] * 8] * 2
        return {"seconds": seconds, "samples": {"rank/0": [0.0], "rank/1": [difference]}}

    monkeypatch.setattr(dispatch, "worker", result)
    for benchmark in dispatch.benchmarks():
        row = benchmark.measure(Settings(pairs=2))
        assert (row.goal, row.ratio, row.met) == (">= 1.2 x", 1.3, met)


def test_skewed_rows_are_all_there_and_none_is_lost() -> None:
    counts = expert_mlps_worker.counts_of(8, 100, skewed=True)
    # 100 / 2.718 = 36.8 for the first, a half, a third ... of it for the others; 4 are left over.
    assert sorted(counts) == [4, 5, 6, 7, 9, 12, 18, 39]
    assert counts != sorted(counts)
    assert expert_mlps_worker.counts_of(8, 96, skewed=False) == [12] * 8


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mlps_are_the_same_within_half_of_what_is_allowed(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--experts", "4", "--ffn", "32", "--rows", "64", "--skewed", "--dtype", dtype]
    expert_mlps_worker.main([*words, "--pairs", "2", "--steps", "1"])
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] <= expert_mlps.TOLERANCE[dtype] / 2
    assert (len(result["ours"]), len(result["peer"])) == (2, 2)


@pytest.mark.parametrize("index", range(5))
def test_a_difference_in_any_tensor_is_seen(index: int) -> None:
    ours, peer = expert_mlps_worker.steps([3, 0, 5], 16, torch.float32)
    wrong = [tensor.clone() for tensor in ours()]
    right = expert_mlps_worker.by_expert(peer())
    assert expert_mlps_worker.difference(wrong, right) <= 1e-5
    wrong[index].view(-1)[-1] += wrong[index].abs().max()
    assert expert_mlps_worker.difference(wrong, right) > 0.5


def our_losses() -> list[float]:
    """On a rank of the pool."""
    with training(TINY, "fp32", "cpu", ["gmm", "moe-permute-fusion"]) as step:
        return [step(index) for index in range(STEPS)]


# A worker imports for seconds, so one of each kind is in the suite.
@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.timeout(600)  # as below
@pytest.mark.needs_plugins("gmm", "moe-permute-fusion")
@pytest.mark.parametrize("system", [peer.system for peer in expert_steps.PEERS])
def test_both_systems_train_the_same_experts(
    gloo_pool: GlooPool, tmp_path: Path, system: str
) -> None:
    [ours] = gloo_pool.run(our_losses, 1)
    assert len({f"{loss:.4f}" for loss in ours}) == STEPS  # they move, so weights are compared too
    words = ["--dtype", "fp32", "--shape", "tiny-experts", "--warmup", "1", "--steps", "2"]
    theirs = printed_by(end_to_end_worker.main, ["--system", system, *words], tmp_path)["losses"]
    assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE["fp32"] / 10)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("plugin", dispatch.PLUGINS)
def test_the_dispatchers_return_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: str
) -> None:
    def start(command: list[str], env: Mapping[str, str], **_: Any) -> Forked:
        assert command[1:3] == ["-m", "benchmarks.dispatch_worker"]
        return Forked(dispatch_worker.main, command[3:], env, tmp_path)

    monkeypatch.setattr(ring_worker, "subprocess", SimpleNamespace(Popen=start, PIPE=None))
    words = ["--plugin", plugin, "--dtype", "fp32", "--tokens", "24", "--experts", "6"]
    words += ["--topk", "3", "--pairs", "1", "--steps", "2"]
    result = ring_worker.all_ranks(words, "dispatch_worker")
    assert len(result["seconds"]) == 4
    assert {*result["samples"]} == {"difference/0", "difference/1"}
    assert all(apart[0] <= 1e-6 for apart in result["samples"].values())


def test_every_weight_of_the_model_has_a_name_in_each_system() -> None:
    states: list[Callable[[llama.Shape], dict[str, torch.Tensor]]] = [
        llama.weights,
        peer_weights.megatron_weights,
        peer_weights.transformers_weights,
    ]
    for state in states:
        assert sum(tensor.numel() for tensor in state(TINY).values()) == TINY.num_parameters()


def test_parameters_of_experts_are_those_that_the_row_names() -> None:
    shape = llama.SHAPES["64-experts"]
    # 2 x 16384 x 512 + 6 (4 x 512^2 + 64 x 512 + 2 x 512 + 64 x 3 x 512 x 256) + 512
    assert shape.num_parameters() == 174_266_880
    assert shape.num_parameters(active=True) == 42_146_304  # 8 x 3 x 512 x 256
    assert "42M of 174M" in expert_steps.benchmarks()[0].name
    assert shape.flops_per_token() == 6 * (42_146_304 - 16384 * 512) + 6 * 6 * 1024 * 512
