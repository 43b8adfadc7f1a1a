"""Shards are transferred bitwise, in the minimum number of sends, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from ascend_run.plugin_api import Numerics
from ascend_run.plugins.checkpoint.gloo_offload import GlooOffload, GlooOffloadConfig
from ascend_run.registry.discovery import discover
from ascend_run.testing.pool import GlooPool

from . import jobs

ELEMENTS: Counter[torch.dtype] = Counter()
for _dtype, _shape in jobs.KINDS.values():
    ELEMENTS[_dtype] += math.prod(_shape)
BYTES = sum(dtype.itemsize * count for dtype, count in ELEMENTS.items())
SLICES = [1, 8, 1000]


def messages(slice_elements: int) -> int:
    """Return the sends of one rank's shards: one stream per dtype."""
    return sum(math.ceil(count / slice_elements) for count in ELEMENTS.values())


def test_it_is_bitwise_neutral_and_has_its_old_name() -> None:
    assert GlooOffload.manifest.numerics is Numerics.BITWISE
    found = discover().load(["gloo-offload", "gloo-free-save"])
    assert found["gloo-offload"] is found["gloo-free-save"] is GlooOffload


@pytest.mark.parametrize("slice_elements", [0, 2**30 + 1])
def test_a_slice_out_of_bounds_is_refused(slice_elements: int) -> None:
    with pytest.raises(ValueError, match="slice_elements"):
        GlooOffloadConfig(slice_elements=slice_elements)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slice_elements", SLICES)
def test_the_writer_saves_what_every_rank_writes(
    gloo_pool: GlooPool, slice_elements: int, ranks: int
) -> None:
    writer, *others = gloo_pool.run(jobs.move, ranks, slice_elements)
    assert all(outcome["saved"] == {} for outcome in others)
    assert all(outcome["path"] == "shelf/one" for outcome in (writer, *others))
    expected = {p.key: p.tensor for p in jobs.shards_of(0, fill=True)}
    for rank in range(1, ranks):
        expected |= {p.key: p.tensor for p in jobs.shards_of(rank, fill=True) if p.writes}
    assert writer["saved"].keys() == expected.keys()
    for key, tensor in expected.items():
        assert writer["saved"][key].dtype is tensor.dtype
        assert torch.equal(writer["saved"][key], tensor), key


@pytest.mark.parametrize("slice_elements", SLICES)
def test_a_save_sends_exactly_the_shards_to_move(gloo_pool: GlooPool, slice_elements: int) -> None:
    writer, *others = gloo_pool.run(jobs.move, 4, slice_elements)
    for sender in others:
        assert sender["saving"] == (messages(slice_elements), BYTES, 0)
        # Two more sends announce the data: a length, and a list.
        assert sender["calls"]["send"] == messages(slice_elements) + 2
    assert writer["saving"] == (3 * messages(slice_elements), 0, 3 * BYTES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slice_elements", SLICES)
def test_every_rank_is_given_what_it_needs(
    gloo_pool: GlooPool, slice_elements: int, ranks: int
) -> None:
    writer, *others = gloo_pool.run(jobs.move, ranks, slice_elements)
    for outcome in (writer, *others):
        assert outcome["values"] == {"ignored": ["rng/*"]}
        for key, tensor in outcome["loaded"].items():
            assert torch.equal(tensor, jobs.content(key, tensor)), key
    # Only the writer's store gets shards, and each once.
    assert len(writer["asked"]) == len(set(writer["asked"])) == (ranks + 1) * len(jobs.KINDS)
    assert all(outcome["asked"] == [] for outcome in others)


def test_a_load_sends_what_all_need_once(gloo_pool: GlooPool) -> None:
    outcomes = gloo_pool.run(jobs.move, 4, 8)
    loading = [outcome["loading"].sent_bytes - outcome["saving"][1] for outcome in outcomes]
    # One broadcast of the replicated shards, and the sharded ones of three ranks.
    assert loading == [4 * BYTES, 0, 0, 0]


def test_a_sender_makes_no_tensor_larger_than_a_slice(gloo_pool: GlooPool) -> None:
    elements, slice_elements = 100_000, 512
    _, sender = gloo_pool.run(jobs.largest_buffer, 2, elements, slice_elements)
    assert sender == 4 * slice_elements


def test_copies_that_differ_are_refused_by_name_before_anything_is_saved(
    gloo_pool: GlooPool,
) -> None:
    assert gloo_pool.run(jobs.compare, 2, False) == ["", ""]
    for refusal in gloo_pool.run(jobs.compare, 2, True):
        assert "nothing is saved" in refusal
        assert "shared/wide at [0, 0]: the replica of rank 1 in the data-parallel group" in refusal
        assert "own/" not in refusal
