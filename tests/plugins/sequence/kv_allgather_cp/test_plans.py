"""Claims and errors, before torch is imported."""

from __future__ import annotations

import pytest

from ascend_run.ops.attention.context_parallel.partitions import Contiguous, ZigZag
from ascend_run.plugins.sequence.kv_allgather_cp import KvAllgatherCp, KvAllgatherCpConfig
from tests.support.ring_jobs import run_of


def test_it_partitions_the_sequence_as_configured() -> None:
    for options, expected in (
        (KvAllgatherCpConfig(cut="zig-zag"), ZigZag()),
        (KvAllgatherCpConfig(cut="contiguous"), Contiguous()),
    ):
        assert KvAllgatherCp(options).ascend_sequence_partition(config=run_of(2)) == expected


def test_options_are_bounded() -> None:
    for options in ({"groups_at_once": 0}, {"kv_cache_every": 0}):
        with pytest.raises(ValueError, match="must be >= 1"):
            KvAllgatherCpConfig(**options)  # type: ignore[arg-type]  # names of several types
