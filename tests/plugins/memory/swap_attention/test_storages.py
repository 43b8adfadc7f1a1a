"""Which storages are copied, freed and brought back, counted by weak references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ascend_run.plugins.memory.swap_attention import SwapAttention, SwapAttentionConfig
from ascend_run.plugins.platforms.cpu.device import CpuDevice

from .toy import HIDDEN, LateDevice, make_inputs, make_stack, swap


def swapping(model: nn.Module, device: Any) -> list[StorageWeakRef]:
    """Swap everything; return a list to which every storage that is copied to the host is added."""
    copier, sent = device.host_copier(), []
    to_host = copier.to_host

    def send(tensor: Tensor) -> Tensor:
        sent.append(StorageWeakRef(tensor.untyped_storage()))
        return to_host(tensor)

    copier.to_host = send
    device.host_copier = lambda: copier
    swap(SwapAttention(SwapAttentionConfig(min_bytes=1)), model, device)
    return sent


def num_alive(references: list[StorageWeakRef]) -> int:
    return sum(not reference.expired() for reference in references)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_all_that_is_copied_is_freed_but_the_last_layers() -> None:
    stack = make_stack(num_layers=4)
    sent = swapping(stack, LateDevice())
    loss = stack(*make_inputs()).square().mean()
    assert len(sent) % 4 == 0
    assert num_alive(sent) == num_alive(sent[-len(sent) // 4 :]) == len(sent) // 4 > 1
    loss.backward()
    assert num_alive(sent) == 0


def keep(x: Tensor) -> Tensor:
    return x


def empty(x: Tensor) -> Tensor:
    """As Megatron empties an output that it recomputes."""
    x.untyped_storage().resize_(0)
    return x


def release(x: Tensor) -> None:
    pass


@pytest.mark.parametrize(("until_backward", "copies"), [(keep, 0), (empty, 1), (release, 1)])
def test_a_storage_that_is_held_elsewhere_is_not_copied_back(
    until_backward: Callable[[Tensor], Tensor | None], copies: int
) -> None:
    """Nothing is freed that is held, and it does not exist twice; in each case no bit changes."""
    plain, stack, device = make_stack(), make_stack(), LateDevice()
    plain(*make_inputs()).square().mean().backward()
    sent = swapping(stack, device)
    outputs: list[Tensor] = []
    hook = stack.norm[0].register_forward_hook(lambda *given: outputs.append(given[-1]))
    loss = stack(*make_inputs()).square().mean()
    hook.remove()
    layers = len(stack.attention)
    assert num_alive(sent) == len(sent) // layers + 1
    contents = outputs[0].detach().clone()
    held = until_backward(outputs.pop())
    if held is not None and copies == 0:
        assert torch.equal(held, contents)
    loss.backward()
    needed_back = len(sent) - len(sent) // layers
    assert device.copier.log.count("to_device") == needed_back - 1 + copies
    assert all(map(torch.equal, gradients(stack), gradients(plain)))


class OfAnother(nn.Module):
    """Its weight belongs to another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weights = (weight,)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0]).tanh()


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.attention = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.attention:
            x = layer(x)
        return x


def test_weights_and_received_inputs_are_not_copied() -> None:
    """As a pipeline stage receives its input: it holds it until the gradient is sent back."""
    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
    model = Layers(OfAnother(weight))
    sent = swapping(model, LateDevice())
    received = make_inputs()[0].requires_grad_()
    output = model(received)
    assert sent == [StorageWeakRef(output.untyped_storage())]


class InPlace(nn.Module):
    """Saves one storage twice, with other contents; backward needs those of the second time."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        hidden.sin()  # saves its input
        return hidden.exp_()


def test_contents_that_changed_are_copied_again() -> None:
    leaves = []
    for swaps in (False, True):
        model = Layers(InPlace())
        sent = swapping(model, CpuDevice()) if swaps else []
        leaf = make_inputs()[0].requires_grad_()
        first, second = model(leaf), model(leaf)  # the first is offloaded by now
        (first + second).sum().backward()
        leaves.append(leaf)
    assert len(sent) == 4
    assert torch.equal(leaves[0].grad, leaves[1].grad)
