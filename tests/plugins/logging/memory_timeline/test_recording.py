"""A recording without a model: storages that live and die as the test says."""

from __future__ import annotations

from typing import Any

import torch

from ascend_run.plugin_api import RunPhase
from ascend_run.plugins.logging.memory_timeline.recording import Recording

KIB = 1024


def recording() -> Recording:
    return Recording(7, [], torch.device("cpu"))


def tensor(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


def totals(samples: list[dict[str, Any]], category: str) -> list[int]:
    return [sample["values"][category] for sample in samples]


def test_what_a_forward_leaves_until_the_step_ends_is_an_activation() -> None:
    record = recording()
    with record.within(RunPhase.FORWARD):
        left = tensor(3)
        _ = tensor(5)
        del _
        kept = tensor(7)
    with record.within(RunPhase.BACKWARD):
        made = tensor(11)
        del left
    del made
    samples = record.end(1)
    assert max(totals(samples, "activations")) == 3 * KIB
    assert max(totals(samples, "other")) == (7 + 11) * KIB
    assert samples[-1]["values"] == dict.fromkeys(samples[-1]["values"], 0) | {"other": 7 * KIB}
    assert {sample["step"] for sample in samples} == {7}
    assert [sample["seconds"] for sample in samples] == sorted(s["seconds"] for s in samples)
    assert kept.numel() == 7 * KIB


def test_views_are_counted_once_and_with_their_whole_storage() -> None:
    whole = tensor(4)
    record = recording()
    with record.within(RunPhase.FORWARD):
        parts = whole[: 2 * KIB] + 1, whole[KIB:].add_(1)
    samples = record.end(1)
    assert samples[-1]["values"]["other"] == (4 + 2) * KIB
    del parts


def test_storages_emptied_by_no_operator_are_measured_again() -> None:
    record = recording()
    with record.within(RunPhase.FORWARD):
        output = tensor(6)
        output.untyped_storage().resize_(0)
    with record.within(RunPhase.BACKWARD):
        output.untyped_storage().resize_(6 * KIB)
    del output
    samples = record.end(1)
    borders = [s for s in samples if s["phase"] == "forward"][-1:] + [
        s for s in samples if s["phase"] == "backward"
    ][-1:]
    assert totals(borders, "activations") == [0, 6 * KIB]


def test_a_step_that_failed_still_has_its_activations() -> None:
    def step(*, failed: bool) -> dict[str, int]:
        record = recording()
        with record.within(RunPhase.FORWARD):
            saved = tensor(2)
        last: dict[str, int] = record.end(1, failed=failed)[-1]["values"]
        assert saved.numel() == 2 * KIB
        return last

    assert step(failed=True)["activations"] == 2 * KIB
    assert step(failed=False)["other"] == 2 * KIB


def test_small_changes_within_a_phase_are_left_out() -> None:
    def samples(min_bytes: int) -> list[int]:
        record = recording()
        with record.within(RunPhase.FORWARD):
            kept = [tensor(1) for _ in range(8)]
        found = totals(record.end(min_bytes), "other")
        assert len(kept) == 8
        return sorted({*found})

    assert samples(1) == [n * KIB for n in range(9)]
    assert samples(4 * KIB) == [0, 4 * KIB, 8 * KIB]


def test_phases_are_told_apart_from_what_is_between_them() -> None:
    record = recording()
    for phase in (RunPhase.FORWARD, RunPhase.FORWARD, RunPhase.UPDATE):
        with record.within(phase):
            pass
    words = [sample["phase"] for sample in record.end(1)]
    changes = [a for a, b in zip(words, [*words[1:], ""], strict=True) if a != b]
    assert changes == ["between", "forward", "between", "forward", "between", "update", "between"]
