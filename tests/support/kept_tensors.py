"""What a layer's forward saves for its backward: as a plan expects it, and as autograd is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ascend_run.core.cost.estimate import RankCost
from ascend_run.core.cost.ledger import Kept, Ledger
from ascend_run.plugin_api import Place

Values = Mapping[str, Any]


def expected_bytes(cost: RankCost) -> float:
    """Of all layers and micro-batches, after what the plugins change; what waits on the host is
    not there, and nothing must be computed again."""
    kept = {
        layer: [Kept(part=t.part, name=t.name, nbytes=t.nbytes) for t in tensors]
        for layer, tensors in cost.rank.kept.items()
    }
    ledger = Ledger(
        kept=kept, steps={}, parameters=[], messages=[], flops=0.0, part_flops={},
        part_messages={}, num_micro_batches=1,
    )  # fmt: skip
    for change in cost.changes.values():
        assert not change.recomputed
        ledger.apply(change)
    here = (t.nbytes for tensors in kept.values() for t in tensors if t.place is Place.DEVICE)
    return cost.rank.num_micro_batches * sum(here)


def saved_bytes(runs: Sequence[tuple[Sequence[str], Values]]) -> list[int]:
    """A rank's job: for each (plugins, config), bytes of the storages that the layers save in a
    step, each once, without parameters and tables."""
    return [_saved(values, plugins) for plugins, values in runs]


def _saved(values: Values, plugins: Sequence[str]) -> int:
    from .small_runs import training

    with training(values, plugins) as run:
        modules = [module for chunk in run.bundle.chunks for module in chunk.modules()]
        layers = [module for module in modules if type(module).__name__ == "TransformerLayer"]
        held: dict[int, Tensor] = {}  # alive, so that no storage gets the place of another
        inside = 0

        def entered(*_: Any) -> None:
            nonlocal inside
            inside += 1

        def left(*_: Any) -> None:
            nonlocal inside
            inside -= 1

        def save(tensor: Tensor) -> Tensor:
            if inside:
                held.setdefault(_storage(tensor), tensor)
            return tensor

        for layer in layers:
            layer.register_forward_pre_hook(entered)
            layer.register_forward_hook(left)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            run.step()
        for tensor in (tensor for module in modules for tensor in _lasting(module)):
            held.pop(_storage(tensor), None)
        return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def _lasting(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and tables that a module holds."""
    yield from module.parameters(recurse=False)
    cache = getattr(module, "_cache", None)
    yield from cache.values() if isinstance(cache, dict) else ()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
