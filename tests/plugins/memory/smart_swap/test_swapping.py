"""Swapping on a toy stack: the same bits, freed storages, the schedule, and steps that differ."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.transfer.saved_storages import whole
from ascend_run.ops.transfer.swap_plan import Away, Link, SwapPlan
from ascend_run.plugins.memory.smart_swap.copy_streams import CopyStreams
from ascend_run.plugins.memory.smart_swap.engine import MOST_PROFILES, Engine
from ascend_run.plugins.memory.smart_swap.planned_step import PlannedStep
from ascend_run.plugins.memory.smart_swap.profile import NumberedBlock, Profile, ProfiledStep

from .toy import LateDevice, make_stack, step, swapping


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def planned(engine: Engine) -> PlannedStep:
    assert isinstance(engine.step, PlannedStep)
    return engine.step


def test_loss_and_gradients_keep_every_bit() -> None:
    want = step(make_stack())
    stack = make_stack()
    engine, device = swapping(stack)
    assert_same_bits(step(stack, engine), want)
    assert isinstance(engine.step, ProfiledStep)
    assert "to_host" not in device.log
    for _ in range(3):
        device.log.clear()
        assert_same_bits(step(stack, engine), want)
        found = planned(engine)
        assert found.as_planned
        assert found.late_fetches == 0
        assert engine.plan is not None
        assert device.log.count("to_host") == len(engine.plan.away) > 0
        assert device.log.count("to_device") == len(engine.plan.away) - len(found.held)
        assert device.log.count("synchronize") == 0


def freed_at_the_loss(device: LateDevice, engine: Engine, stack: Any) -> list[bool]:
    """Take a planned step; return of each storage that is away at the first loss whether it is
    freed."""
    found: list[bool] = []

    def look() -> None:
        if found:
            return
        assert engine.plan is not None
        last = planned(engine)._at - 1
        away = sorted(engine.plan.away.values(), key=lambda when: when.sent)
        sent = [when for when in away if when.sent <= last]
        for when, storage in zip(sent, device.sent, strict=True):
            if when.released <= last < when.fetched:
                found.append(storage.expired())

    step(stack, engine, at_the_loss=look)
    return found


def test_what_is_away_is_freed_unless_something_holds_it() -> None:
    stack = make_stack()
    engine, device = swapping(stack)
    step(stack, engine)
    freed = freed_at_the_loss(device, engine, stack)
    assert len(freed) > 6
    assert all(freed)


def test_a_storage_that_something_holds_is_not_copied_back() -> None:
    want = step(make_stack())
    stack = make_stack()
    engine, device = swapping(stack)
    norm: Any = stack.layers[0].norm
    held: list[Tensor] = []
    hook = norm.register_forward_hook(lambda *given: held.append(given[-1]))
    assert_same_bits(step(stack, engine), want)
    assert not all(freed_at_the_loss(device, engine, stack))
    assert len(planned(engine).held) == 2  # of two micro-batches
    left_out = planned(engine).held
    device.log.clear()
    assert_same_bits(step(stack, engine), want)
    hook.remove()
    assert planned(engine).held == set()
    assert engine.plan is not None
    assert left_out.isdisjoint(engine.plan.away)
    assert device.log.count("to_host") == len(engine.plan.away) > 0


def test_no_storage_is_left_after_a_step() -> None:
    stack = make_stack()
    engine, device = swapping(stack)
    for _ in range(2):
        step(stack, engine)
    assert all(storage.expired() for storage in device.sent)
    assert len(engine._known) == 0
    assert planned(engine)._leaving == planned(engine)._coming == []


@pytest.mark.parametrize("other", [{"rows": 4}, {"num_layers": 3}], ids=str)
def test_a_step_that_differs_is_right_and_profiled_again(other: dict[str, int]) -> None:
    """With fewer layers it differs when storages are away already."""
    want, usual = step(make_stack(), **other), step(make_stack())
    stack = make_stack()
    engine, _ = swapping(stack)
    for _ in range(2):
        assert_same_bits(step(stack, engine), usual)
    assert_same_bits(step(stack, engine, **other), want)
    assert not planned(engine).as_planned
    assert (planned(engine).late_fetches > 0) is ("num_layers" in other)
    assert_same_bits(step(stack, engine, **other), want)
    assert isinstance(engine.step, ProfiledStep)
    assert_same_bits(step(stack, engine, **other), want)
    assert planned(engine).as_planned


class Failure(Exception):
    """Of a step, when it has come to its first loss."""


def fail(stack: Any, engine: Engine) -> None:
    def at_the_loss() -> None:
        raise Failure

    with suppress(Failure):  # which keeps no frame, and so no graph
        step(stack, engine, at_the_loss=at_the_loss)


def test_a_step_that_has_failed_is_tried_again_as_it_was() -> None:
    want = step(make_stack())
    stack = make_stack()
    engine, device = swapping(stack)
    fail(stack, engine)
    assert_same_bits(step(stack, engine), want)
    assert isinstance(engine.step, ProfiledStep)
    fail(stack, engine)
    plan = engine.plan
    assert_same_bits(step(stack, engine), want)
    assert engine.plan is plan
    assert planned(engine).as_planned
    assert all(storage.expired() for storage in device.sent)


def test_only_steps_that_end_are_counted_before_the_profiled_one() -> None:
    stack = make_stack()
    engine, device = swapping(stack, warmup_steps=1)
    fail(stack, engine)
    step(stack, engine)
    assert engine.step is None
    assert device.log == []
    step(stack, engine)
    assert isinstance(engine.step, ProfiledStep)


def block_of(tensor: Tensor, index: int) -> NumberedBlock:
    storage = tensor.untyped_storage()
    return NumberedBlock(
        index=index,
        nbytes=storage.nbytes(),
        source=StorageWeakRef(storage),
        device=whole(storage),
    )


def test_copies_in_flight_when_a_step_differs_are_finished_and_kept() -> None:
    """The first storage is on its way to the host when an event comes that is not the next one."""
    device: Any = LateDevice()
    profile = Profile(
        events=[(True, 0), (True, 1), (True, 2), (False, 2), (False, 1), (False, 0)],
        times=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        nbytes=[32, 32, 32],
        parts=["mlp"] * 3,
    )
    plan = SwapPlan(away={0: Away(0, 2, 4)}, bytes_before=96, bytes_at_peak=64)
    step = PlannedStep(CopyStreams(device), profile, plan)
    tensors = [torch.full((8,), float(index)) for index in range(3)]
    first = block_of(tensors[0], 0)
    step.saved(first, "mlp", tensors[0])
    assert device.log == ["to_host"]
    step.saved(block_of(tensors[2], 2), "mlp", tensors[2])
    assert device.log == ["to_host", "wait_host"]
    step.used(first)
    assert not step.as_planned
    assert step.late_fetches == 0
    assert first.device is not None
    assert torch.equal(first.device, whole(tensors[0].untyped_storage()))


def test_contents_that_change_before_they_leave_stay_where_they_are() -> None:
    device: Any = LateDevice()
    profile = Profile(
        events=[(True, 0), (True, 1), (False, 1), (False, 0)],
        times=[0.0, 1.0, 2.0, 3.0],
        nbytes=[32, 32],
        parts=["mlp"] * 2,
    )
    plan = SwapPlan(away={0: Away(1, 2, 3)}, bytes_before=64, bytes_at_peak=64)
    step = PlannedStep(CopyStreams(device), profile, plan)
    tensors = [torch.ones(8), torch.ones(8)]
    blocks = [block_of(tensor, index) for index, tensor in enumerate(tensors)]
    step.saved(blocks[0], "mlp", tensors[0])
    tensors[0].add_(1)
    step.saved(blocks[1], "mlp", tensors[1])
    step.used(blocks[1])
    step.used(blocks[0])
    assert step.as_planned
    assert "to_host" not in device.log
    assert blocks[0].device is not None


def test_steps_that_all_differ_end_it_with_a_warning() -> None:
    stack = make_stack()
    engine, device = swapping(stack)
    with capture_logs() as events:
        for rows in range(4, 13):
            assert_same_bits(step(stack, engine, rows=rows), step(make_stack(), rows=rows))
    names = [event["event"] for event in events]
    assert names.count("smart-swap.planned") == MOST_PROFILES
    assert names.count("smart-swap.stopped") == 1
    assert events[names.index("smart-swap.stopped")]["log_level"] == "warning"
    assert engine.step is None
    device.log.clear()
    step(stack, engine)
    assert device.log == []


def test_nothing_leaves_where_the_link_is_slow_or_the_budget_is_kept() -> None:
    for options in ({"link": Link(to_host=1.0, to_device=1.0)}, {"budget": 1 << 30}):
        stack = make_stack()
        engine, device = swapping(stack, **options)
        with capture_logs() as events:
            for _ in range(2):
                step(stack, engine)
        assert engine.plan is not None
        assert engine.plan.away == {}
        assert "to_host" not in device.log
        assert all(event["log_level"] == "info" for event in events)


def test_a_budget_that_cannot_be_met_is_said() -> None:
    stack = make_stack()
    engine, _ = swapping(stack, budget=1000, link=Link(to_host=1.0, to_device=1.0))
    with capture_logs() as events:
        for _ in range(2):
            step(stack, engine)
    (said,) = (event for event in events if event["event"] == "smart-swap.over_budget")
    assert engine.plan is not None
    assert said["log_level"] == "warning"
    assert said["expected_bytes"] == engine.plan.bytes_before > said["budget_bytes"] == 1000


def test_the_link_is_measured_when_its_speed_is_not_given() -> None:
    stack = make_stack()
    engine, _ = swapping(stack, link=None)
    with capture_logs() as events:
        for _ in range(2):
            step(stack, engine)
    (said,) = (event for event in events if event["event"] == "smart-swap.planned")
    assert said["to_host_gb"] > 0
    assert said["to_device_gb"] > 0


def test_storages_are_profiled_by_size_and_time() -> None:
    """Of an MLP: its input, the gate together with what it scales, the output of the activation,
    and then what dropout and the second matrix save."""
    stack = make_stack()
    engine, _ = swapping(stack)
    step(stack, engine)
    found: Any = engine.step
    profile = found.profile
    assert profile.times == sorted(profile.times)
    assert {*profile.parts} == {"mlp"}
    rows = 8 * 2
    assert profile.nbytes[0] == rows * 16 * 4
    assert profile.nbytes[1] == 2 * profile.nbytes[2] == rows * 64 * 4
    per_layer = len(profile.nbytes) // (2 * 4)
    assert len(profile.nbytes) == 2 * 4 * per_layer
    storages = profile.storages(())
    assert all(one.saved <= one.settled < one.used <= one.freed for one in storages)
    first, last = storages[0], storages[per_layer * 3]
    assert first.saved < last.saved < last.used < first.used
