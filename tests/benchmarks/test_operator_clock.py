"""The clock by which the benchmarks of memory choose what is swapped."""

from __future__ import annotations

import time

import torch

from benchmarks.operator_clock import operator_clock


def test_an_operator_takes_as_long_as_its_bytes_are_read_and_written() -> None:
    outside = time.perf_counter
    with operator_clock(2.0) as clock:
        x = torch.ones(250)
        begin = clock.seconds
        x + x
        moved, inside = clock.seconds - begin, time.perf_counter
    assert round(moved * 1e9) == 3 * 1000 / 2
    assert inside is not outside
    assert time.perf_counter is outside
