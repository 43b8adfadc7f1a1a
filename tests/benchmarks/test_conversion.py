"""The harness of the rows of ``convert``, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import conversion, conversion_worker
from benchmarks.protocol import Settings


def test_every_row_of_conversion_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that torch is imported once."""
    jobs = []

    def worker(module: str, job: str, source: Path, *words: str) -> dict[str, float]:
        assert module == "conversion_worker"
        jobs.append(job)
        target = Path(words[0]) if job == "keep" else source.with_name(f"target{len(jobs)}")
        if job == "copy":
            return {"seconds": conversion_worker.copy(source, target)}
        words = words[1:] if job == "keep" else words
        measured = conversion_worker.peak if job == "peak" else conversion_worker.convert
        found = measured(source, target, [*words])
        assert any(target.rglob("*.*"))
        return found

    tiny = (("input_layernorm", (16,)), ("post_attention_layernorm", (16,)))
    tiny += tuple((f"self_attn.{p}_proj", (16 if p in "qo" else 4, 16)) for p in "qkvo")
    tiny += (("mlp.gate_proj", (24, 16)), ("mlp.up_proj", (24, 16)), ("mlp.down_proj", (16, 24)))
    config = {**conversion._CONFIG, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    for name, value in (
        ("worker", worker),
        ("_LAYER", tiny),
        ("_HIDDEN", 16),
        ("_VOCABULARY", 40),
        ("_CONFIG", {**config, "num_attention_heads": 8, "num_key_value_heads": 2}),
    ):
        monkeypatch.setattr(conversion, name, value)
    rows = [benchmark.measure(Settings.quick()) for benchmark in conversion.benchmarks()]
    assert [row.name for row in rows] == [one.name for one in conversion.benchmarks()]
    assert all(row.ours is not None and row.goal == one.goal
               for row, one in zip(rows, conversion.benchmarks(), strict=True))  # fmt: skip
    assert jobs.count("copy") == 3
    assert jobs.count("keep") == 2
    assert jobs.count("peak") == 3
    assert "hf to mp-rank" in rows[-1].note
