"""The share of the fingerprint is measured in a true run."""

from __future__ import annotations

from pathlib import Path

from benchmarks import fingerprint_worker
from tests.benchmarks.tiny_run import STEPS, tiny_run
from tests.support.forked import printed_by


def test_each_step_has_a_time_an_entry_and_sampled_elements(tmp_path: Path) -> None:
    found = printed_by(fingerprint_worker.main, tiny_run(tmp_path), tmp_path)
    warm = STEPS // 3
    # Before the first step the file has an entry, too; the first part is what is before any step.
    assert found["entries"] == STEPS + 1
    assert len(found["spent_seconds"]) == STEPS - warm
    assert min(found["spent_seconds"]) > 0
    assert 0 < found["tensors"] <= found["elements"]
