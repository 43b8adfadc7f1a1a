"""Declarations, errors and partitions, before torch is imported."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import ConfigError, Layout, RunConfig
from ascend_run.plugins.sequence.unaligned_ulysses import UnalignedUlysses, UnalignedUlyssesConfig
from ascend_run.plugins.sequence.unaligned_ulysses.partition import UnevenParts
from ascend_run.types.config import DataSection
from tests.support.tiny_configs import model_fields, parallel_fields

PLUGIN = UnalignedUlysses(UnalignedUlyssesConfig())


def problems(
    *,
    heads: int = 10,
    tp: int = 1,
    cp: int = 4,
    pp: int = 1,
    length: int,
    pads: bool = False,
) -> list[str]:
    sizes = {
        "context_parallel_size": cp,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
    }
    config = RunConfig(
        model=model_fields(
            {
                "num_attention_heads": heads,
                "num_layers": 2,
                "moe_pad_expert_input_to_capacity": pads,
            }
        ),
        parallel=parallel_fields(sizes),
        data=DataSection(seq_length=length),
    )
    layout = Layout(world_size=tp * cp * pp, tp=tp, cp=cp, pp=pp)
    return list(PLUGIN.ascend_check(config=config, layout=layout))


def test_heads_and_lengths_that_the_ranks_do_not_divide_are_taken() -> None:
    assert problems(length=18) == []
    assert problems(length=18, tp=2, cp=2) == []
    assert problems(length=5, cp=1, pp=2) == []
    assert problems(length=18, pp=2) == []


def test_what_cannot_be_shared_is_refused_with_the_values_that_can() -> None:
    (heads,) = problems(length=32, heads=6, tp=2)
    assert "3 heads of a tensor-parallel rank" in heads
    assert "parallel.context_parallel_size=4; use at most 3" in heads
    (length,) = problems(length=6, tp=2)
    assert "data.seq_length=6" in length
    assert "use at least 8" in length


def test_padded_experts_need_as_many_tokens_on_every_rank() -> None:
    (found,) = problems(length=18, pads=True)
    assert "data.seq_length=18 is not a multiple of 4; set it to false" in found
    assert problems(length=20, pads=True) == []


def test_the_first_ranks_hold_one_unit_more() -> None:
    held = UnevenParts(seq_length=18, unit=2)
    assert [held.chunks(18, rank, 4) for rank in range(4)] == [
        ((0, 6),),
        ((6, 10),),
        ((10, 14),),
        ((14, 18),),
    ]
    assert held.lengths(4) == [6, 4, 4, 4]
    assert [held.full_length(n, rank, 4) for rank, n in enumerate((6, 4, 4, 4))] == [18] * 4
    with pytest.raises(ConfigError, match=r"rank 0 of 4 holds 4 positions.* expected 6 of"):
        held.full_length(4, 0, 4)


def test_rows_in_one_sequence_are_known_by_a_ranks_part_too() -> None:
    """For any length, all rows together give each rank more positions than one row does."""
    for length in range(4, 40):
        for rows in (2, 3):
            held = UnevenParts(seq_length=length, rows=rows)
            for whole in held.uneven:
                lengths = held.lengths(4, whole)
                assert sum(lengths) == whole
                assert [held.full_length(n, i, 4) for i, n in enumerate(lengths)] == [whole] * 4


def test_a_run_of_equal_parts_takes_shorter_batches_of_equal_parts() -> None:
    held = UnevenParts(seq_length=16)
    assert [held.chunks(8, rank, 4) for rank in range(4)] == [
        ((0, 2),),
        ((2, 4),),
        ((4, 6),),
        ((6, 8),),
    ]
    assert [held.full_length(n, 1, 4) for n in (2, 4)] == [8, 16]
    with pytest.raises(ConfigError, match=r"a batch of 10 positions .* give multiples of 4"):
        held.chunks(10, 0, 4)
