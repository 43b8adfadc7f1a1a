"""What a model says of its shards, and what is refused because it would be lost in silence."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

from ascend_run.core.checkpoint.boxes import Box
from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
from ascend_run.plugin_api import CheckpointError

from .tensors import numbers


class Model(nn.Module):
    """One weight [4, 6], and what ``listing`` says of it."""

    def __init__(self, listing: Callable[[nn.Parameter], dict[str, Any]], tp: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 6))
        self.listing = listing
        self.config = types.SimpleNamespace(
            tensor_model_parallel_size=tp, expert_tensor_parallel_size=1
        )

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        assert metadata["non_homogeneous_layers"]
        return self.listing(self.weight)


def listed(*offsets: tuple[int, int, int], **options: Any) -> Callable[[Tensor], dict[str, Any]]:
    return lambda weight: {"w": ShardedTensor.from_rank_offsets("w", weight, *offsets, **options)}


def test_a_shard_shares_the_memory_of_its_parameter_and_knows_its_place() -> None:
    model = Model(listed((1, 2, 3), replica_id=(0, 0, 1)))
    (shard,) = model_shards(sharded_tensors([model]), prefix="policy")
    assert (shard.key, shard.offset, shard.global_shape) == ("policy/w", (0, 12), (4, 18))
    assert not shard.writes
    shard.tensor.zero_()
    assert model.weight.eq(0).all()


def test_axes_that_only_the_global_tensor_has_come_first() -> None:
    model = Model(listed((0, 3, 5), (1, 1, 2), prepend_axis_num=1))
    (shard,) = model_shards(sharded_tensors([model]))
    assert (shard.offset, shard.global_shape) == ((3, 4, 0), (5, 8, 6))
    assert shard.tensor.shape == (1, 4, 6)
    assert shard.writes


def test_the_tensors_of_a_factory_are_sharded_where_it_splits() -> None:
    def halves(key: str, weight: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        gate, up = weight.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(key, gate, (0, 1, 4)),
            ShardedTensor.from_rank_offsets(key, up, (0, 3, 4)),
        ]

    model = Model(lambda weight: {"w": ShardedTensorFactory("w", weight, halves, torch.cat)})
    (held,) = sharded_tensors([model])
    assert [region.local for region in held.regions] == [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]
    gate, up = model_shards([held])
    assert (gate.offset, up.offset, up.global_shape) == ((2, 0), (6, 0), (8, 6))
    assert torch.equal(up.tensor, model.weight[2:])


def test_a_factory_that_copies_is_refused() -> None:
    def copies(key: str, weight: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        return [ShardedTensor.from_rank_offsets(key, weight.clone())]

    model = Model(lambda weight: {"w": ShardedTensorFactory("w", weight, copies, torch.cat)})
    with pytest.raises(CheckpointError, match="w: its parts are copies, not views"):
        sharded_tensors([model])


@pytest.mark.parametrize(
    ("rank", "vocab_size", "kept"), [(0, 7, 4), (1, 7, 3), (1, 4, 0), (1, 3, 0), (0, 3, 3)]
)
def test_rows_that_pad_the_vocabulary_are_left_out(rank: int, vocab_size: int, kept: int) -> None:
    model = Model(listed((0, rank, 2), allow_shape_mismatch=True))
    (shard,) = model_shards(sharded_tensors([model], vocab_size=vocab_size))
    assert shard.global_shape == (vocab_size, 6)
    assert shard.tensor.shape == (kept, 6)
    assert shard.offset[0] + kept <= vocab_size


def test_a_parameter_that_is_not_listed_is_refused() -> None:
    with pytest.raises(CheckpointError, match="weight: the module that holds it does not list it"):
        sharded_tensors([Model(lambda weight: {})])


def test_a_tensor_parallel_parameter_that_a_wrapper_hides_is_refused() -> None:
    model = Model(listed(), tp=2)
    model.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="w: each of 2 tensor-parallel ranks holds a part"):
        sharded_tensors([model])


def test_an_object_is_refused_unless_it_is_empty() -> None:
    def with_state(data: Any) -> Model:
        return Model(
            lambda weight: {
                **listed()(weight),
                "w._extra_state": ShardedObject("w._extra_state", data, (1,), (0,)),
                "local": LocalNonpersistentObject("nothing to save"),
            }
        )

    assert len(sharded_tensors([with_state(None)])) == 1
    assert len(sharded_tensors([with_state(torch.empty(0))])) == 1
    with pytest.raises(CheckpointError, match=r"w\._extra_state: a bytes, not a tensor"):
        sharded_tensors([with_state(b"pickled")])
