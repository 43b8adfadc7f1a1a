"""Map the elements of each local parameter to the global tensors of a model.

Reads Megatron's ``sharded_state_dict``, which knows layer offsets, tensor- and expert-parallel
sharding, tied embeddings and replicas. Optimizer states have the parameter's shape, so they use the
same mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

from ascend_run.core.model.layer_slots import named_by_number
from ascend_run.ops.linear.stored_weight import stored_weight
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import TensorShard

from .boxes import Box, whole

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

_OWN_KEY_FOR_EACH_LAYER = {"non_homogeneous_layers": True}
"""Metadata for Megatron: one key per layer (``decoder.layers.3.mlp...``), not stacked layers."""


@attrs.frozen
class Region:
    """A box of a local tensor and its location in a global tensor."""

    key: str
    local: Box
    offset: tuple[int, ...]
    """Offset in the global tensor; leading axes that the local tensor lacks come first."""
    global_shape: tuple[int, ...]
    replica: tuple[int, ...]
    """Megatron's replica id; all zeros on the rank that writes.

    Its last entry counts the data-parallel replicas.
    """

    @property
    def writes(self) -> bool:
        """Whether this rank is the first replica."""
        return not any(self.replica)

    def shard(self, prefix: str, part: Tensor, box: Box, *, writes: bool) -> TensorShard:
        """Return the shard for ``part``, the box ``box`` (inside ``local``) of a tensor.

        The tensor must be sharded like this region's tensor.
        """
        prepended = len(self.global_shape) - len(box.shape)
        steps = (mine - its for mine, its in zip(box.offset, self.local.offset, strict=True))
        shift = (*(0,) * prepended, *steps)
        return TensorShard(
            key=f"{prefix}/{self.key}",
            tensor=part[(None,) * prepended],
            global_shape=self.global_shape,
            offset=tuple(start + step for start, step in zip(self.offset, shift, strict=True)),
            writes=writes,
        )


@attrs.frozen
class ShardedLocal:
    """A local tensor of a model and its regions."""

    tensor: Tensor
    regions: tuple[Region, ...]


def sharded_tensors(
    chunks: Sequence[nn.Module], *, vocab_size: int | None = None, stored: bool = False
) -> list[ShardedLocal]:
    """Return every parameter and persistent buffer of a model on this rank.

    Args:
        chunks: Virtual pipeline chunks, wrapped for data parallelism or not.
        vocab_size: Number of rows of the embedding and output layer without padding. The padding
            depends on the tensor-parallel size and is not saved.
        stored: Whether to include weights that are stored in another form (``StoredWeight``).

    Raises:
        CheckpointError: Megatron does not list a parameter, or a value is not a tensor.
    """
    found: list[ShardedLocal] = []
    problems: list[str] = []
    for chunk in chunks:
        model = unwrapped(chunk)
        listed = list(_leaves(model.sharded_state_dict(metadata=dict(_OWN_KEY_FOR_EACH_LAYER))))
        for item in listed:
            if isinstance(item, ShardedObject):
                if not _is_empty(item.data):
                    problems.append(f"{item.key}: a {type(item.data).__name__}, not a tensor")
                continue
            regions = tuple(
                attrs.evolve(region, key=named_by_number(region.key, model))
                for region in _regions(item, vocab_size)
            )
            if stored or stored_weight(item.data) is None:
                found.append(ShardedLocal(item.data, regions))
        known = {id(item.data) for item in listed}
        problems += [
            f"{name}: the module that holds it does not list it in sharded_state_dict"
            for name, parameter in model.named_parameters()
            if id(parameter) not in known
        ]
        problems += _not_sharded(model, found)
    if problems:
        raise CheckpointError("this model cannot be checkpointed", problems)
    return found


def model_shards(tensors: Sequence[ShardedLocal], prefix: str = "model") -> list[TensorShard]:
    """Return the shards of a model; they share its memory, so loading fills the model."""
    return [
        region.shard(
            prefix,
            held.tensor.detach()[region.local.slices_in(whole(held.tensor.shape))],
            region.local,
            writes=region.writes,
        )
        for held in tensors
        for region in held.regions
    ]


def unwrapped(module: nn.Module) -> Any:
    """Return the model inside its data-parallel and precision wrappers."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _leaves(tree: object) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _leaves(item)
    elif not isinstance(tree, LocalNonpersistentObject):
        yield tree


def _regions(
    item: ShardedTensor | ShardedTensorFactory, vocab_size: int | None
) -> Iterator[Region]:
    """Yield one region for a tensor, and several for a factory.

    A factory splits a tensor, such as the gate and up projections of a gated MLP.
    """
    if isinstance(item, ShardedTensor):
        region = _region(item, whole(item.local_shape))
        if item.allow_shape_mismatch and vocab_size is not None:
            region = _without_padding(region, item.prepend_axis_num, vocab_size)
        yield region
        return
    for part in _leaves(item.build()):
        yield _region(part, _box_of_view(item.key, part.data, item.data))


def _region(item: ShardedTensor, local: Box) -> Region:
    replica = item.replica_id if isinstance(item.replica_id, tuple) else (item.replica_id,)
    return Region(item.key, local, tuple(item.global_offset), tuple(item.global_shape), replica)


def _without_padding(region: Region, axis: int, rows: int) -> Region:
    """Return the region clipped to ``rows`` rows of the global tensor."""
    kept = max(0, min(region.local.shape[0], rows - region.offset[axis]))
    shape = (*region.global_shape[:axis], rows, *region.global_shape[axis + 1 :])
    offset = (*region.offset[:axis], min(region.offset[axis], rows), *region.offset[axis + 1 :])
    local = Box(region.local.offset, (kept, *region.local.shape[1:]))
    return attrs.evolve(region, local=local, offset=offset, global_shape=shape)


def _box_of_view(key: str, view: Tensor, base: Tensor) -> Box:
    """Return the box of ``base`` that a view of it covers."""
    elements = int(view.storage_offset()) - int(base.storage_offset())
    same_memory = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    if not same_memory or view.stride() != base.stride():
        raise CheckpointError(
            "this model cannot be checkpointed", [f"{key}: its parts are copies, not views"]
        )
    offset = []
    for stride in base.stride():
        index, elements = divmod(elements, stride)
        offset.append(index)
    return Box(tuple(offset), tuple(view.shape))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def _not_sharded(model: MegatronModule, tensors: Sequence[ShardedLocal]) -> Iterator[str]:
    """Yield tensor-parallel parameters that Megatron lists as unsharded.

    If a wrapper hides the parallel linear inside it, every rank's shard looks like a replica, and
    only one of them would be saved.
    """
    for held in tensors:
        if not getattr(held.tensor, "tensor_model_parallel", False):
            continue
        is_expert = not getattr(held.tensor, "allreduce", True)
        size = (
            model.config.expert_tensor_parallel_size
            if is_expert
            else model.config.tensor_model_parallel_size
        )
        for region in held.regions:
            if size is not None and size > 1 and region.global_shape == tuple(held.tensor.shape):
                yield (
                    f"{region.key}: each of {size} tensor-parallel ranks holds a part, but it is "
                    "listed as whole; a wrapper of its module must pass sharded_state_dict on"
                )
