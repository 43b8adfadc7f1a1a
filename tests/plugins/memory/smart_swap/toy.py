"""A small stack of MLPs, and a device with delayed copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.transfer.swap_plan import Link
from ascend_run.plugins.memory.smart_swap.engine import Engine

# S sequence, B batch, H hidden size

HIDDEN = 16
INSTANT = Link(to_host=1e15, to_device=1e15)
"""All copies are overlapped."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 64), nn.Linear(32, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x_SBH: Tensor) -> Tensor:
        gate, up = self.fc1(x_SBH).chunk(2, dim=-1)  # the second is at an offset of one storage
        out: Tensor = self.fc2(self.dropout(nn.functional.gelu(gate) * up))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x_SBH: Tensor) -> Tensor:
        out: Tensor = x_SBH + self.mlp(self.norm(x_SBH))
        return out


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x_SBH: Tensor, num_layers: int) -> Tensor:
        for layer in list(self.layers)[:num_layers]:
            x_SBH = layer(x_SBH)
        return x_SBH


def make_stack(num_layers: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(num_layers)


def swapping(stack: Stack, **options: Any) -> tuple[Engine, LateDevice]:
    """Wrap the MLP of every layer as the kernel does."""
    device: Any = LateDevice()
    given = {"min_bytes": 1, "warmup_steps": 0, "budget": 0, "link": INSTANT, **options}
    engine = Engine(device, **given)
    for layer in stack.layers:
        for link in engine.links(layer, ["mlp"]).values():
            mlp: Any = layer.mlp
            mlp.forward = link.wrap(mlp.forward)
    return engine, device


def step(
    stack: Stack,
    engine: Engine | None = None,
    *,
    rows: int = 8,
    num_layers: int = 4,
    at_the_loss: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Run two micro-batches; return the losses and the gradients."""
    if engine is not None:
        engine.begin_step()
    stack.zero_grad()
    torch.manual_seed(1)  # of dropout
    losses = []
    for seed in (2, 3):
        generator = torch.Generator().manual_seed(seed)
        x_SBH = torch.randn(rows, 2, HIDDEN, generator=generator)
        loss = stack(x_SBH, num_layers).square().mean()
        at_the_loss()
        loss.backward()
        losses.append(loss.detach())
    if engine is not None:
        engine.end_step()
    return [*losses, *(p.grad.clone() for p in stack.parameters() if p.grad is not None)]


class LateCopier:
    """contracts.HostCopier whose copies only run when they are waited for.

    Until then the target holds 0xff, which is nan in every floating dtype: reading too early, or
    overwriting a source too early, is detected.
    """

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.sent: list[StorageWeakRef] = []
        self._pending: list[Callable[[], object]] = []

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        host = torch.empty_like(tensor) if out is None else out
        host.fill_(0xFF)
        self._pending.append(lambda: host.copy_(tensor))
        self.sent.append(StorageWeakRef(tensor.untyped_storage()))
        self.log.append("to_host")
        return host

    def wait_host(self) -> None:
        self._run("wait_host")

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.fill_(0xFF)
        self._pending.append(lambda: out.copy_(host))
        self.log.append("to_device")

    def wait_device(self) -> None:
        self._run("wait_device")

    def _run(self, what: str) -> None:
        for copy in self._pending:
            copy()
        self._pending.clear()
        self.log.append(what)


class LateDevice:
    """The part of contracts.Device that swapping uses."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copiers: list[LateCopier] = []

    def host_copier(self) -> LateCopier:
        self.copiers.append(LateCopier(self.log))
        return self.copiers[-1]

    def synchronize(self) -> None:
        self.log.append("synchronize")

    @property
    def sent(self) -> list[StorageWeakRef]:
        """Storages that were copied to the host."""
        return [storage for copier in self.copiers for storage in copier.sent]
