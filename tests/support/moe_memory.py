"""What a mixture of experts keeps for backward, and training steps, for plugins that recompute.

Jobs of ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.collective_releases import count_after_releases
from ascend_run.testing.effects import count_operations

Run = tuple[Sequence[str], Mapping[str, Any]]
"""Plugins, and the config."""


SMALL = 128
"""Bytes: counts and readings of each expert are left out."""


@attrs.frozen
class Stepped:
    """Some steps of a run on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    operations: list[Mapping[str, int]]
    """Of each step."""
    loads: list[float]
    """This rank's tokens by expert, over layers and steps."""


def steps(runs: Sequence[Run], busy: int = 0, drops: bool = False) -> list[Stepped]:
    """Train each run for two steps.

    Args:
        busy: Number of experts, the first ones, that all tokens go to, by their bias; 0: none.
        drops: Whether the experts' kernel drops some of its input, by the generator of all ranks
            and by that of each.
    """
    return [_steps(plugins, values, busy, drops) for plugins, values in runs]


def _steps(plugins: Sequence[str], values: Mapping[str, Any], busy: int, drops: bool) -> Stepped:
    from .small_runs import training

    losses, operations = [], []
    loads = torch.zeros(values["model.num_moe_experts"])

    def count(_: nn.Module, __: object, routing: tuple[Tensor, Tensor]) -> None:
        if routing[0].requires_grad:
            loads.add_(routing[1].sum(0))

    with training(values, plugins) as run:
        for router in _modules(run.bundle.chunks, "Router"):
            router.register_forward_hook(count)
            if busy:
                router.expert_bias[:busy] = 10.0
        for experts in _modules(run.bundle.chunks, "Experts") if drops else ():
            experts.compute = partial(_dropping, experts.compute)
        for _ in range(2):
            with count_operations() as seen:
                losses.append(run.step().loss)
            operations.append(dict(seen))
        weights = {
            f"{at}.{name}": parameter.detach().clone()
            for at, chunk in enumerate(run.bundle.chunks)
            for name, parameter in chunk.named_parameters()
        }
    return Stepped(losses, weights, operations, loads.tolist())


def differences(found: Stepped, expected: Stepped) -> list[str]:
    """Return what is not equal in every bit."""
    names = [
        name
        for name, weight in expected.weights.items()
        if not torch.equal(weight, found.weights[name])
    ]
    return names if found.losses == expected.losses else ["loss", *names]


def _dropping(kernel: Any, tokens: Tensor, *rest: Any) -> Tensor:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tokens = F.dropout(tokens, 0.2)
    with get_cuda_rng_tracker().fork():
        tokens = F.dropout(tokens, 0.2)
    out: Tensor = kernel(tokens, *rest)
    return out


def _modules(chunks: Sequence[nn.Module], kind: str) -> list[Any]:
    return [m for chunk in chunks for m in chunk.modules() if type(m).__name__ == kind]


class _Storages(TorchDispatchMode):
    """Every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.seen[reference.cdata] = reference, storage.nbytes()
        return out

    def alive(self, besides: Sequence[Tensor]) -> int:
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in besides}
        return sum(
            nbytes
            for key, (reference, nbytes) in self.seen.items()
            if key not in known and nbytes >= SMALL and not reference.expired()
        )


def kept_bytes(runs: Sequence[Run], skew: float = 0.0) -> list[list[int]]:
    """Return for each run and layer the bytes that exist after the forward of its experts, besides
    their input, output and parameters.

    Args:
        skew: Added to the logits of the first two experts, so that more tokens go there.
    """
    return [_kept(plugins, values, skew) for plugins, values in runs]


def _kept(plugins: Sequence[str], values: Mapping[str, Any], skew: float) -> list[int]:
    from .small_runs import training

    with training(values, plugins) as run:
        layers = _modules(run.bundle.chunks, "MoELayer")
        return [_kept_by(layer, values, skew) for layer in layers]


def _kept_by(layer: nn.Module, values: Mapping[str, Any], skew: float) -> int:
    length, width = values["data.seq_length"], values["model.hidden_size"]
    torch.manual_seed(1)
    weight = layer.router.weight
    hidden = torch.randn(length, 1, width).to(next(layer.experts.parameters()).dtype)
    if skew:
        with torch.no_grad():
            weight[:2] += skew * hidden.mean((0, 1)).sign()
            hidden += hidden.mean((0, 1)).sign()
    hidden.requires_grad_()
    with _Storages() as storages:
        out, _ = layer(hidden)
    gc.collect()
    alive = partial(storages.alive, [hidden, out, *layer.parameters()])
    return count_after_releases(alive) if dist.get_world_size() > 1 else alive()
