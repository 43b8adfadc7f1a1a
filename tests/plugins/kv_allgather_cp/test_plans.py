"""What is claimed and what is refused, before torch is imported."""

from __future__ import annotations

import pytest

from ascend_run.ops.attention.ring_attention.cut import Contiguous, ZigZag
from ascend_run.plugin_api import Claim, Numerics
from ascend_run.plugins.kv_allgather_cp import KvAllgatherCp, KvAllgatherCpConfig
from tests.support.ring_jobs import run_of


def test_it_cuts_the_sequence_as_asked_and_owns_its_exchange() -> None:
    manifest = KvAllgatherCp.manifest
    assert manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert manifest.numerics is Numerics.ROUNDING
    assert manifest.idle is not None
    assert not manifest.idle.holds(run_of(2))
    for options, expected in (
        (KvAllgatherCpConfig(cut="zig-zag"), ZigZag()),
        (KvAllgatherCpConfig(cut="contiguous"), Contiguous()),
    ):
        assert KvAllgatherCp(options).ascend_sequence_partition(config=run_of(2)) == expected


def test_options_are_bounded() -> None:
    for options in ({"groups_at_once": 0}, {"kv_cache_every": 0}):
        with pytest.raises(ValueError, match="must be >= 1"):
            KvAllgatherCpConfig(**options)  # type: ignore[arg-type]  # names of several types
