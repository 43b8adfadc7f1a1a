"""Swapping on a toy stack: bitwise equal results, freed device storage, waits in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.plugins.memory.swap_attention import SwapAttention, SwapAttentionConfig

from .toy import LateDevice, Stack, ToyAttention, make_inputs, make_stack, swap


def swapping(
    stack: Stack, *, min_bytes: int = 1, prefetch: int = 1
) -> tuple[SwapAttention, LateDevice]:
    """Wrap every layer of the stack as the kernel does."""
    plugin = SwapAttention(SwapAttentionConfig(min_bytes=min_bytes, prefetch=prefetch))
    device: Any = LateDevice()
    swap(plugin, stack, device)
    return plugin, device


def step(stack: Stack, seeds: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32) -> Any:
    """Return losses and gradients: all forwards first, then their backwards, first in first out."""
    stack.zero_grad()
    losses = []
    for seed in seeds:
        x, table = make_inputs(dtype, seed)
        losses.append(stack(x, table).square().mean())
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in stack.named_parameters()}
    return [loss.detach() for loss in losses], gradients


def backward_log(stack: Stack, device: LateDevice) -> list[str]:
    """Return the copier's calls in a backward, and where each attention's own backward starts."""
    log = device.copier.log

    def watch(index: int, attention: nn.Module) -> None:
        def begin(gradient: Tensor) -> None:
            log.append(f"backward {index}")

        def attach(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(begin)

        attention.register_forward_hook(attach)

    for index, attention in enumerate(stack.attention):
        watch(index, attention)
    loss = stack(*make_inputs()).square().mean()
    log.clear()
    loss.backward()
    return log


def assert_same_bits(got: Any, want: Any) -> None:
    for result, expected in zip(got[0], want[0], strict=True):
        assert torch.equal(result, expected)
    assert got[1].keys() == want[1].keys()
    for name, expected in want[1].items():
        assert torch.equal(got[1][name], expected), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_loss_and_gradients_keep_every_bit(prefetch: int, dtype: torch.dtype) -> None:
    want = step(make_stack(dtype=dtype), dtype=dtype)
    stack = make_stack(dtype=dtype)
    plugin, _ = swapping(stack, prefetch=prefetch)
    assert_same_bits(step(stack, dtype=dtype), want)
    assert plugin._readings(context=None)["swap_bytes"] > 0


def test_several_micro_batches_may_be_under_way() -> None:
    want = step(make_stack(), seeds=(1, 2, 3))
    stack = make_stack()
    swapping(stack)
    assert_same_bits(step(stack, seeds=(1, 2, 3)), want)


def test_a_second_step_is_as_right_as_the_first() -> None:
    want = step(make_stack())
    stack = make_stack()
    swapping(stack)
    step(stack)
    assert_same_bits(step(stack), want)


def test_device_storage_is_gone_between_forward_and_backward() -> None:
    plain, stack = make_stack(), make_stack()
    swapping(stack)
    losses = [model(*make_inputs()).square().mean() for model in (plain, stack)]
    for attention in plain.attention:
        assert not any(storage.expired() for storage in attention.made)
    for attention in list(stack.attention)[:-1]:
        assert all(storage.expired() for storage in attention.made)
    # The last layer's backward comes next, so its tensors stay.
    assert not any(storage.expired() for storage in stack.attention[-1].made)
    for loss in losses:
        loss.backward()


def test_the_last_layer_goes_when_another_forward_follows() -> None:
    stack = make_stack()
    swapping(stack)
    first = stack(*make_inputs()).square().mean()
    made = stack.attention[-1].made
    second = stack(*make_inputs()).square().mean()
    assert all(storage.expired() for storage in made)
    (first + second).backward()


def test_nothing_is_left_on_device_or_host_after_backward() -> None:
    stack = make_stack()
    plugin, _ = swapping(stack)
    stack(*make_inputs()).square().mean().backward()
    assert plugin._swapper is not None
    assert plugin._swapper._last is not None
    assert plugin._swapper._last() is None
    assert plugin._swapper._leaving == []


def test_a_layer_is_brought_back_during_the_backward_of_the_one_after_it() -> None:
    stack = make_stack(num_layers=3)
    _, device = swapping(stack, prefetch=1)
    log = backward_log(stack, device)
    copies = ["to_device"] * (log.count("to_device") // 2)
    # Layer 2 was never swapped. Layer 1 is fetched from layer 2's backward on and waited for in its
    # own, which starts fetching layer 0.
    assert log == [
        "backward 2",
        "wait_host",
        *copies,
        "backward 1",
        "wait_device",
        *copies,
        "backward 0",
        "wait_device",
    ]


def test_without_prefetch_a_layer_is_brought_back_in_its_own_backward() -> None:
    stack = make_stack(num_layers=3)
    _, device = swapping(stack, prefetch=0)
    log = backward_log(stack, device)
    copies = ["to_device"] * (log.count("to_device") // 2)
    assert log == [
        "backward 2",
        "wait_host",
        "backward 1",
        *copies,
        "wait_device",
        "backward 0",
        *copies,
        "wait_device",
    ]


def micro_batches(stack: Stack, schedule: str) -> None:
    """Run one step: ``F`` a forward, ``B`` the backward of the oldest one, ``b`` of the newest."""
    losses: list[Tensor] = []
    for word in schedule:
        if word == "F":
            losses.append(stack(*make_inputs(seed=len(losses) + 1)).square().mean())
        else:
            losses.pop(0 if word == "B" else -1).backward()


@pytest.mark.parametrize("schedule", ["FFFBBB", "FFBFBB", "FFFbBB", "FFFFBbBb"])
def test_the_order_of_backwards_is_learnt_in_the_first_step(schedule: str) -> None:
    """As in pipelines: the next backward is not that of the previous forward."""
    stack = make_stack(num_layers=3)
    plugin, _ = swapping(stack, prefetch=1)
    late = []
    for _ in range(3):
        plugin.ascend_before_step()
        micro_batches(stack, schedule)
        late.append(plugin._readings(context=None)["late_fetches"])  # type: ignore[arg-type]
    assert late[0] > 0
    assert late[1:] == [0.0, 0.0]


def test_without_prefetch_nothing_that_left_is_there_in_time() -> None:
    stack = make_stack(num_layers=3)
    plugin, _ = swapping(stack, prefetch=0)
    for _ in range(2):
        plugin.ascend_before_step()
        micro_batches(stack, "FFBB")
    # All six but the last layer of the second forward, which was never swapped.
    assert plugin._readings(context=None)["late_fetches"] == 5.0  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["FFFBBB", "FFBFBB", "FFFbBB", "FB"])
def test_a_step_of_another_schedule_than_the_last_keeps_every_bit(schedule: str) -> None:
    plain, stack = make_stack(), make_stack()
    plugin, _ = swapping(stack, prefetch=2)
    plugin.ascend_before_step()
    micro_batches(stack, "FFFFBBBB")
    plugin.ascend_before_step()
    for model in (plain, stack):
        model.zero_grad()
        micro_batches(model, schedule)
    for (name, expected), result in zip(plain.named_parameters(), stack.parameters(), strict=True):
        assert torch.equal(result.grad, expected.grad), name  # type: ignore[arg-type]


def test_views_of_one_storage_travel_once() -> None:
    stack = make_stack(num_layers=1)
    plugin, device = swapping(stack)
    x, table = make_inputs()
    stack(x, table)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    plain = make_stack(num_layers=1)
    normed = plain.norm[0](x)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        plain.attention[0](normed, table)
    long_lived = {p.untyped_storage().data_ptr() for p in plain.attention[0].parameters()}
    long_lived.add(table.untyped_storage().data_ptr())
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in kept
        if t.untyped_storage().data_ptr() not in long_lived
    }
    assert len(kept) > len(storages)
    assert device.copier.log.count("to_host") == len(storages)
    assert plugin._readings(context=None)["swap_bytes"] == sum(storages.values())


def test_parameters_and_shared_tables_are_never_copied() -> None:
    stack = make_stack(num_layers=1)
    _, device = swapping(stack)
    x, table = make_inputs()
    sent: list[int] = []
    to_host = device.copier.to_host
    device.copier.to_host = lambda t: (sent.append(t.data_ptr()), to_host(t))[1]  # type: ignore[method-assign]
    stack(x, table)
    assert sent
    assert not set(sent) & {table.data_ptr(), *(p.data_ptr() for p in stack.parameters())}


def test_parameters_are_sought_once_per_layer_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, stack, sought = SwapAttention(SwapAttentionConfig(min_bytes=1)), make_stack(3), []
    swap(plugin, stack, LateDevice())
    parameters = ToyAttention.parameters
    monkeypatch.setattr(
        ToyAttention, "parameters", lambda self: sought.append(self) or parameters(self)
    )
    for _ in range(2):
        sought.clear()
        plugin.ascend_before_step()
        for _ in range(2):  # micro-batches
            stack(*make_inputs()).square().mean().backward()
        assert sought == [*stack.attention]


def test_small_tensors_stay() -> None:
    want = step(make_stack())
    stack = make_stack()
    plugin, device = swapping(stack, min_bytes=1 << 20)
    assert_same_bits(step(stack), want)
    assert device.copier.log == []
    assert plugin._readings(context=None)["swap_bytes"] == 0.0


def test_evaluation_copies_nothing() -> None:
    stack = make_stack()
    _, device = swapping(stack)
    with torch.no_grad():
        stack(*make_inputs())
    assert device.copier.log == []


def test_a_graph_that_is_kept_can_be_walked_twice() -> None:
    plain, stack = make_stack(), make_stack()
    swapping(stack)
    for model in (plain, stack):
        loss = model(*make_inputs()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, expected), result in zip(plain.named_parameters(), stack.parameters(), strict=True):
        assert torch.equal(result.grad, expected.grad), name  # type: ignore[arg-type]


def test_a_forward_without_backward_holds_nothing_back() -> None:
    stack = make_stack()
    swapping(stack)
    stack(*make_inputs())  # the graph is dropped at once
    want = step(make_stack())
    assert_same_bits(step(stack), want)


def test_parameter_names_stay() -> None:
    stack = make_stack()
    names = set(stack.state_dict())
    swapping(stack)
    assert set(stack.state_dict()) == names
