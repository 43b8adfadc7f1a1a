"""The GPU's rows: their arithmetic and words here; their figures need a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import end_to_end, end_to_end_worker, gpu_step, llama
from benchmarks.protocol import GPU_PEERS_PYTHON, PEERS_PYTHON, NotMeasured, Settings
from benchmarks.rows import NO_GPU, Row

SPEED = 55_000.0


def rows_of(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[tuple[str, ...], Any]]) -> list[Row]:
    """All rows where every system is equally fast; the workers' calls are noted."""

    def result(module: str, *words: str, python: Any = None, **_: Any) -> dict[str, Any]:
        calls.append((words, python))
        return {
            "tokens_per_second": SPEED,
            "losses": [10.4] * 4,
            "peak_bytes": 40 * 2**30,
            "device": "NVIDIA H200",
        }

    monkeypatch.setattr(gpu_step, "_gpu", lambda: ("NVIDIA H200", ""))
    monkeypatch.setattr(gpu_step, "worker", result)
    monkeypatch.setattr(end_to_end, "worker", result)
    return [benchmark.measure(Settings(pairs=2)) for benchmark in gpu_step.benchmarks()]


def test_utilisation_of_the_model_is_what_one_reckons_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 6 (1,345,423,360 - 65,536,000) + 6 x 24 x 2048 x 2048 = 8,283,303,936 a token;
    # 6 x 1,345,423,360 + 12 x 24 x 2048 x 2048 = 9,280,499,712 by llm-foundry's convention.
    assert gpu_step.SHAPE.flops_per_token() == 8_283_303_936
    row = rows_of(monkeypatch, [])[-1]
    assert row.ours == 455.6  # 55,000 x 8.2833e9
    assert row.peer == 989.0
    assert row.ratio == 0.4606
    assert row.met
    assert "up to 0.516 x in llm-foundry's convention; peak 40.00 GiB" in row.note


def test_every_system_gets_equal_settings_and_runs_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[tuple[str, ...], Any]] = []
    rows = rows_of(monkeypatch, calls)
    assert {words[2:] for words, _ in calls} == {
        (*gpu_step.WORDS, "--steps", "20", "--warmup", "5")
    }
    assert {(words[1], python) for words, python in calls} == {
        ("ascend-run-compiled", None),
        ("transformers-liger-compiled", GPU_PEERS_PYTHON),
        ("litgpt-compiled", PEERS_PYTHON),
    }
    assert {words[1] for words, _ in calls} <= {*end_to_end_worker.SYSTEMS}
    assert [(row.device, row.ratio, row.goal) for row in rows[:2]] == [
        ("NVIDIA H200", 1.0, ">= 1 x")
    ] * 2
    assert "aim 1.15 x" in rows[0].note


def test_without_a_gpu_every_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "_gpu", lambda: ("", "needs a GPU; torch x finds none here"))
    for benchmark in gpu_step.benchmarks():
        assert benchmark.device() == NO_GPU
        with pytest.raises(NotMeasured, match="needs a GPU; torch x finds none here; unverified"):
            benchmark.measure(Settings())


def test_the_shape_is_the_one_in_the_rows_name() -> None:
    words = dict(zip(gpu_step.WORDS[::2], gpu_step.WORDS[1::2], strict=True))
    assert llama.SHAPES[words["--shape"]] is gpu_step.SHAPE
    assert gpu_step.SHAPE.seq_length == 2048
    assert (words["--device"], words["--dtype"]) == ("cuda", "bf16")
