"""Which storages are copied, freed and brought back, counted by weak references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ascend_run.ops.swapping.call import Call
from ascend_run.ops.swapping.swapper import Swapper
from ascend_run.ops.transfer.saved_storages import Block
from ascend_run.plugins.memory.swap_attention import SwapAttention, SwapAttentionConfig
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import Values, training

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


def alive_at_the_loss(values: Values) -> list[dict[int, tuple[int, int]]]:
    """Return for each of two steps: layer -> how many storages it has sent, and how many of these
    are alive when the model returns its loss. A rank's job."""
    sent: dict[int, list[StorageWeakRef]] = {}
    steps: list[dict[int, tuple[int, int]]] = []
    send = Swapper.send

    def watched(swapper: Swapper, call: Call, storage: torch.UntypedStorage) -> Block:
        sent.setdefault(call.layer[1], []).append(StorageWeakRef(storage))
        return send(swapper, call, storage)

    def at_loss(*_: object) -> None:
        steps.append({layer: (len(of), num_alive(of)) for layer, of in sent.items()})
        sent.clear()

    with patch.object(Swapper, "send", watched), training(values, ["swap-attention"]) as run:
        (chunk,) = run.bundle.chunks
        chunk.register_forward_hook(at_loss)
        run.step_with_events()
        run.step_with_events()
    return steps


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_layers_of_megatron_hold_nothing_that_is_copied_until_the_loss(
    gloo_pool: GlooPool, model: str
) -> None:
    """But the last layer, whose backward comes next."""
    values = {
        **MODELS[model],
        "model.num_layers": 4,
        "train.global_batch_size": 1,
        "plugins.swap-attention.min_bytes": 1,
    }
    for layers in gloo_pool.run(alive_at_the_loss, 1, values)[0]:
        assert [*layers] == [0, 1, 2, 3]
        for sent, alive in [*layers.values()][:-1]:
            assert sent > 1
            assert alive == 0
        sent, alive = layers[3]
        assert sent == alive > 1


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
