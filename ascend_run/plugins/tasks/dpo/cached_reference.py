"""Log-probabilities of the reference, computed once and read with the samples; imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.weight_sources import weight_source, weights_digest
from ascend_run.plugin_api import (
    Arrays,
    Batch,
    BatchField,
    Datasets,
    RoleSpec,
    RunContext,
    SampleBlend,
    Samples,
)
from ascend_run.plugins.tasks.shared.pairs import PAIR_FIELDS
from ascend_run.plugins.tasks.shared.samples import SampleTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT: Final = 1
_PLACE: Final = "place"
_FIELD: Final = BatchField(axes=("batch", "sequence"))
_ADAPTERS: Final = "adapter_config.json"


def with_reference(context: RunContext, role: RoleSpec, datasets: Datasets) -> Datasets:
    """Return the same samples with a further field, the log-probability that the reference gives to
    each trained token, by the name of the role. Must be called on every rank.

    Raises:
        StorageError: The cache cannot be read or written.
    """

    def add(data: SampleBlend | Samples | None) -> SampleBlend | Samples | None:
        if isinstance(data, SampleBlend):
            return attrs.evolve(
                data, datasets=tuple(_added(context, role, d) for d in data.datasets)
            )
        return None if data is None else _added(context, role, data)

    evaluates = context.config.train.eval_interval > 0
    return Datasets(
        train=add(datasets.train),
        validation=add(datasets.validation) if evaluates else datasets.validation,
    )


def _added(context: RunContext, role: RoleSpec, data: Samples) -> Samples:
    assert isinstance(data, SampleTensors)
    return _WithValues(data, role.name, _values(context, role, data)) if len(data) else data


class _WithValues:
    """Samples with one value of each trained token, and 0 elsewhere.

    Args:
        arrays: ``values`` of the trained tokens of all packs, and where each pack's ``ends``.
    """

    def __init__(self, data: SampleTensors, name: str, arrays: Arrays) -> None:
        self._data, self._name, self._arrays = data, name, arrays

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        pack = self._data.samples.pack_of(index)
        tensors = self._data.tensors_of(pack)
        ends, values = self._arrays["ends"], self._arrays["values"]
        own = torch.tensor(values[ends[pack - 1] if pack else 0 : ends[pack]])
        added = own.new_zeros(tensors["loss_mask"].shape)
        added[tensors["loss_mask"] > 0] = own
        return {**tensors, self._name: added}


class _Packs:
    """The samples of an epoch, each once and then some again, with the place of each token.

    Args:
        number: At least that of the packs.
    """

    def __init__(self, data: SampleTensors, number: int) -> None:
        self._data, self._number = data, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        tensors = self._data.tensors_of(index % len(self._data.samples.packs))
        length = len(tensors["tokens"])
        return {**tensors, _PLACE: torch.arange(length) + index * length}


def _values(context: RunContext, role: RoleSpec, data: SampleTensors) -> Arrays:
    """Return the log-probabilities of a dataset, from the cache if they are there."""
    run = context.frozen_pass
    assert run is not None, "models are built before the data is opened"
    if not run.repeatable:
        return _computed(context, role, data)
    facts = facts_of(context, role, data)
    found = _found(context, facts)
    is_there = _on_every_rank(context, found is not None)
    structlog.get_logger().info(
        "dpo.reference_log_probs",
        source="cache" if is_there else "computed before the first step",
        samples=len(data.samples.packs),
    )
    if is_there and found is not None:
        return found
    computed = _computed(context, role, data)
    return context.cache.arrays(facts, lambda: computed)


class _Missing(Exception):
    """The cache has no such arrays."""


def _found(context: RunContext, facts: Mapping[str, object]) -> Arrays | None:
    # Ranks compute together, so none may wait for another one that holds the cache's lock.
    def refuse() -> Arrays:
        raise _Missing

    try:
        return context.cache.arrays(facts, refuse)
    except _Missing:
        return None


def _on_every_rank(context: RunContext, here: bool) -> bool:
    """Return whether something holds on all ranks."""
    missing = torch.tensor(int(not here), device=context.device.torch_device)
    for group in (context.groups.dp_cp, context.groups.tp, context.groups.pp):
        dist.all_reduce(missing, group=group)
    return not missing.item()


def _computed(context: RunContext, role: RoleSpec, data: SampleTensors) -> Arrays:
    """Run the reference over all samples of an epoch; on every rank, return all results."""
    packs = data.samples.packs
    at_once, length = context.config.train.global_batch_size, context.config.data.seq_length
    rounds = -(-len(packs) // at_once)
    values = [
        row[data.tensors_of(pack)["loss_mask"] > 0]
        for pack, row in zip(
            range(len(packs)),
            _rows(context, role, _Packs(data, rounds * at_once), at_once, length),
            strict=False,  # the last round may begin the epoch again
        )
    ]
    return {
        "values": torch.cat(values).numpy(),
        "ends": np.cumsum([len(row) for row in values]).astype(np.int64),
    }


def _rows(
    context: RunContext, role: RoleSpec, data: Samples, at_once: int, length: int
) -> Iterator[Tensor]:
    """Yield the results of each sample, [length]; 0 where there are none."""
    run = context.frozen_pass
    assert run is not None
    fields = {**PAIR_FIELDS, _PLACE: _FIELD}
    batches = run(context, role, data, fields)
    for first in range(0, len(data), at_once):
        # On the last round this also ends the iterator, which frees the model.
        is_last = first + at_once >= len(data)
        some = batches if is_last else islice(batches, at_once // context.layout.dp)
        yield from _gathered(context, role.name, [*some], first * length, at_once * length).view(
            at_once, length
        )


def _gathered(
    context: RunContext, name: str, batches: Sequence[Batch], first: int, size: int
) -> Tensor:
    """Return the results of all ranks, by the places of the tokens from ``first`` on, [size]."""
    groups, policy = context.groups, next(iter(context.models.values()))
    is_wide = policy.transformer_config.params_dtype is torch.float64
    found = torch.zeros(
        size,
        dtype=torch.float64 if is_wide else torch.float32,
        device=context.device.torch_device,
    )
    for batch in batches:
        if name in batch.tensors:
            found[batch.tensors[_PLACE].flatten() - first] = batch.tensors[name].flatten()
    # A token has its result on one rank of those that share the samples; the others add 0.
    dist.all_reduce(found, group=groups.dp_cp)
    if groups.pp.size() > 1:
        dist.broadcast(found, dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return found.cpu()


def facts_of(context: RunContext, role: RoleSpec, data: SampleTensors) -> Mapping[str, object]:
    """Return what the bits of the log-probabilities depend on: whatever else a run has."""
    config, layout = context.config, context.layout
    plugins = {
        name: attrs.asdict(options)
        for name, options in sorted(config.plugins.items())
        if name != config.task
    }
    settings = {
        "model": {name: value for name, value in config.model.items() if name != "hf_path"},
        "parallel": dict(config.parallel),
        "ranks": {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp")},
        "platform": config.platform,
        "enable": config.enable,
        "plugins": plugins,
    }
    weights = config.model.hf_path if role.is_base else context.models[role.name].weights
    return {
        "kind": "log-probabilities of a reference",
        "format": _FORMAT,
        "samples": data.samples.digest(),
        "weights": weight_source(weights, config.run.seed)["digest"],
        "is_base": role.is_base,
        "adapters": [
            weights_digest(value, _ADAPTERS)
            for options in plugins.values()
            for value in options.values()
            if isinstance(value, str) and (Path(value) / _ADAPTERS).is_file()
        ],
        "precision": config.train.precision,
        "loss_chunk_bytes": config.train.loss_chunk_bytes,
        "torch": torch.__version__,
        "settings": _digest(settings),
    }


def _digest(settings: Mapping[str, object]) -> str:
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
