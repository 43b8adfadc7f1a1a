"""The rows of generation: which results count."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import generation, generation_worker, serving, serving_worker
from benchmarks.protocol import Settings
from benchmarks.rows import Row


def measured(
    monkeypatch: pytest.MonkeyPatch,
    speed: float = 2.0,
    first: float = 1.1,
    held: int = 100,
    ids: tuple[int, ...] = (1, 2, 3),
) -> dict[str, Row]:
    """The rows, if ours is so many times as fast and the first token takes so many forwards."""

    def worker(module: str, system: str, work: str, *words: str, python: Any) -> dict[str, Any]:
        assert module == "generation_worker"
        assert (python is not None) == system.startswith("litgpt")
        if system == "ascend-run":
            return {
                "one": {"tokens_per_second": 10 * speed, "tokens": 3, "ids": [[*ids]]},
                "batch": {"tokens_per_second": 10 * speed, "tokens": 3, "ids": [[*ids]]},
                "first": {"first_seconds": first, "forward_seconds": 1.0},
                "bytes": {"storages": held, "formula": 100},
            }[work]
        return {"tokens_per_second": 10, "tokens": 3, "ids": [[1, 2, 3]]}

    monkeypatch.setattr(generation, "worker", worker)
    rows = {one.name: one.measure(Settings(pairs=3)) for one in generation.benchmarks()}
    assert [row.goal for row in rows.values()] == [one.goal for one in generation.benchmarks()]
    return rows


@pytest.mark.parametrize(("speed", "met"), [(2.0, 6), (1.99, 4), (1.3, 4), (1.29, 0)])
def test_one_stream_has_a_lower_goal_than_a_batch(
    monkeypatch: pytest.MonkeyPatch, speed: float, met: int
) -> None:
    rows = measured(monkeypatch, speed=speed)
    assert sum(rows[peer.name].met for peer in generation.PEERS) == met


@pytest.mark.parametrize(("first", "met"), [(1.099, True), (1.101, False)])
def test_the_first_token_takes_at_most_a_tenth_longer(
    monkeypatch: pytest.MonkeyPatch, first: float, met: bool
) -> None:
    assert measured(monkeypatch, first=first)[generation.FIRST].met is met


@pytest.mark.parametrize(("held", "met"), [(100, True), (101, False), (99, False)])
def test_the_cache_has_the_bytes_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, held: int, met: bool
) -> None:
    assert measured(monkeypatch, held=held)[generation.BYTES].met is met


def test_other_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, ids=(1, 2, 4))
    assert not any(rows[peer.name].met for peer in generation.PEERS)
    assert "request 0: [1, 2, 4] are not [1, 2, 3]" in rows[generation.PEERS[0].name].note


def test_late_tokens_may_differ() -> None:
    same = [0] * generation.SAME_TOKENS
    assert generation.different([[*same, 1]], [[*same, 2]]) is None


def test_requests_are_mixed_and_fit_the_model() -> None:
    lengths = [(len(prompt), new) for prompt, new in generation_worker.requests("batch")]
    assert len({*lengths}) == 16
    assert max(map(sum, lengths)) <= generation_worker.SHAPE.seq_length


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the workers' model and requests small."""
    shape = attrs.evolve(generation_worker.SHAPE, layers=2, hidden=64, ffn=96, vocab=256)
    monkeypatch.setattr(generation_worker, "SHAPE", shape)
    monkeypatch.setattr(generation_worker, "FIRST_TOKENS", 32)
    asked = [([7, 9, 250], 5), ([3] * 20, 3)]
    monkeypatch.setattr(generation_worker, "requests", lambda work: asked)


@pytest.mark.usefixtures("tiny")
def test_workers_answer_as_transformers(tmp_path: Path) -> None:
    generation_worker.write(tmp_path)
    given = generation_worker.requests("batch")
    theirs = generation_worker.transformers(given)()
    with ExitStack() as stack:
        ours = generation_worker.ascend_run(given, tmp_path, stack)
        assert ours() == ours() == theirs
        found = generation_worker.timed(ours, steps=2, warmup=1)
    assert (found["tokens"], found["ids"]) == (8, theirs)


@pytest.mark.usefixtures("tiny")
def test_the_worker_measures_the_first_token_and_the_cache(tmp_path: Path) -> None:
    generation_worker.write(tmp_path)
    with ExitStack() as stack:
        first = generation_worker.first_token(tmp_path, stack, steps=1, warmup=0)
    assert min(first["first_seconds"], first["forward_seconds"]) > 0
    with ExitStack() as stack:
        held = generation_worker.cache_bytes(tmp_path, stack)
    # Pages of 16 tokens: one and two; two layers, keys and values, 64 wide, in float32.
    assert held["storages"] == held["formula"] == 3 * 16 * 2 * 2 * 64 * 4


@pytest.mark.usefixtures("tiny")
def test_the_server_is_asked_for_what_the_library_answers(tmp_path: Path) -> None:
    serving_worker.write(tmp_path)
    given = generation_worker.requests("batch")
    with serving_worker.both(tmp_path) as ways:
        answered = {name: answers(given) for name, answers in ways.items()}
        assert answered == {"library": [5, 3], "served": [5, 3]}
        assert serving_worker.seconds(ways["served"], given, steps=1, warmup=0) > 0


@pytest.mark.parametrize(("served", "met"), [(1.049, True), (1.051, False)])
def test_serving_costs_at_most_a_twentieth(
    monkeypatch: pytest.MonkeyPatch, served: float, met: bool
) -> None:
    def worker(module: str, way: str, *words: str) -> dict[str, float]:
        return {"tokens": 10, "seconds": {"served": served}.get(way, 1.0)}

    monkeypatch.setattr(serving, "worker", worker)
    rows = [one.measure(Settings(pairs=3)) for one in serving.benchmarks()]
    assert [row.met for row in rows] == [met, met]
    assert [row.goal for row in rows] == [one.goal for one in serving.benchmarks()]
