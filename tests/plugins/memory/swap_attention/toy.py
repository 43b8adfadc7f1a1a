"""A small stack of attention layers, and a device with delayed copies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.core.model.forward_chain import install
from ascend_run.plugins.memory.swap_attention import SwapAttention
from ascend_run.types.forward import LinkPlace, NamedLink

# S sequence, B batch, H hidden size

HIDDEN, HEADS = 16, 2


class ToyAttention(nn.Module):
    """Attention with rotary-like tables; records two storages that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.made: list[StorageWeakRef] = []

    def forward(self, x_SBH: Tensor, table_SH: Tensor) -> Tensor:
        q, k, v = self.qkv(x_SBH).chunk(3, dim=-1)
        q, k = q * table_SH[:, None], k * table_SH[:, None]
        v = v * v.abs()  # saves v itself: a view into the middle of a storage
        heads = [x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for x in (q, k, v)]
        weights = (heads[0] @ heads[1].transpose(-1, -2)).softmax(-1)
        mixed = (weights @ heads[2]).permute(2, 0, 1, 3).flatten(2)
        self.made = [StorageWeakRef(x.untyped_storage()) for x in (weights, mixed)]
        return self.out(mixed)


class Stack(nn.Module):
    """Layers with residuals and a norm, so that the attention's input is a separate tensor."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(ToyAttention() for _ in range(num_layers))
        self.norm = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(num_layers))

    def forward(self, x_SBH: Tensor, table_SH: Tensor) -> Tensor:
        for norm, attention in zip(self.norm, self.attention, strict=True):
            x_SBH = x_SBH + attention(norm(x_SBH), table_SH)
        return x_SBH


def make_stack(num_layers: int = 3, dtype: torch.dtype = torch.float32) -> Stack:
    torch.manual_seed(0)
    return Stack(num_layers).to(dtype)


def swap(plugin: SwapAttention, stack: Any, device: Any) -> None:
    """Install the links of every layer's attention as the kernel does."""
    for place, attention in enumerate(stack.attention):
        policy = plugin.ascend_activation_policy(place=place, chunk=0, num_chunks=1)
        make = policy["self_attention"].links
        assert make is not None
        layer = SimpleNamespace(self_attention=attention)
        link = make(layer, ["self_attention"], device)["self_attention"]
        named = NamedLink(name="swap-attention", place=LinkPlace.AROUND, link=link)
        install(stack, {attention: [named]})


def make_inputs(dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2, HIDDEN, generator=generator).to(dtype)
    table = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    return x, table


class LateCopier:
    """contracts.HostCopier whose copies only run when they are waited for.

    Until then the target holds 0xff, which is nan in every floating dtype: reading too early, or
    overwriting a source too early, is detected.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._to_host: list[Callable[[], object]] = []
        self._to_device: list[Callable[[], object]] = []

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        host = torch.empty_like(tensor) if out is None else out
        host.fill_(0xFF)
        self._to_host.append(lambda: host.copy_(tensor))
        self.log.append("to_host")
        return host

    def wait_host(self) -> None:
        _run(self._to_host)
        self.log.append("wait_host")

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.fill_(0xFF)
        self._to_device.append(lambda: out.copy_(host))
        self.log.append("to_device")

    def wait_device(self) -> None:
        _run(self._to_device)
        self.log.append("wait_device")


def _run(pending: list[Callable[[], object]]) -> None:
    for copy in pending:
        copy()
    pending.clear()


class LateDevice:
    """The part of contracts.Device that swapping uses."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.copier = LateCopier()

    def host_copier(self) -> LateCopier:
        return self.copier
