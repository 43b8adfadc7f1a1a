"""Activations that a layer saves for backward: as a plan expects them, and as autograd sees
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ascend_run.core.config.activation_policy import LayerPolicy
from ascend_run.plugin_api import Storage
from ascend_run.tools.plan.cost_model.estimate import RankCost
from ascend_run.tools.plan.cost_model.ledger import Ledger, Saved
from ascend_run.tools.plan.cost_model.recompute import treat_as_plugins_do

Values = Mapping[str, Any]


def expected_bytes(cost: RankCost, policies: Mapping[int, LayerPolicy] | None = None) -> float:
    """Return the sum over layers and micro-batches, after plugins' changes; excludes tensors
    offloaded to the host.

    Args:
        policies: What is recomputed or discarded in the layers; None: nothing.
    """
    saved = {
        layer: [Saved(part=t.part, name=t.name, nbytes=t.nbytes) for t in tensors]
        for layer, tensors in cost.rank.saved.items()
    }
    ledger = Ledger(
        saved=saved, steps={}, parameters=[], communication=[], flops=0.0, part_flops={},
        part_communication={}, num_microbatches=1,
    )  # fmt: skip
    if policies is not None:
        ledger.part_flops = {layer: {} for layer in saved}
        ledger.part_communication = {layer: {} for layer in saved}
        treat_as_plugins_do(ledger, policies)
    for change in cost.changes.values():
        ledger.apply(change)
    here = (t.nbytes for tensors in saved.values() for t in tensors if t.storage is Storage.DEVICE)
    return cost.rank.num_microbatches * sum(here)


def saved_bytes(runs: Sequence[tuple[Sequence[str], Values]], before: int = 0) -> list[int]:
    """Return for each (plugins, config) the bytes of the distinct storages that the layers save in
    a step, as they are at the end of a layer, without parameters and tables. A rank's job.

    Args:
        before: Steps that are taken first, with their events.
    """
    return [_saved(values, plugins, before) for plugins, values in runs]


def _saved(values: Values, plugins: Sequence[str], before: int) -> int:
    from .small_runs import training

    with training(values, plugins) as run:
        for _ in range(before):
            run.step_with_events()
        modules = [module for chunk in run.bundle.chunks for module in chunk.modules()]
        layers = [module for module in modules if type(module).__name__ == "TransformerLayer"]
        held: dict[int, Tensor] = {}  # kept alive, so that no storage address is reused
        sizes: dict[int, int] = {}
        inside = 0

        def entered(*_: Any) -> None:
            nonlocal inside
            inside += 1

        def left(*_: Any) -> None:
            nonlocal inside
            inside -= 1
            for storage in held.keys() - sizes.keys() if not inside else ():
                sizes[storage] = held[storage].untyped_storage().nbytes()

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
            sizes.pop(_storage(tensor), None)
        return sum(sizes.values())


def _lasting(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, buffers and tables of a module."""
    yield from module.parameters(recurse=False)
    # Not by buffers(), a name that Megatron's DistributedDataParallel redefines.
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    cache = getattr(module, "_cache", None)
    yield from cache.values() if isinstance(cache, dict) else ()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
