"""What replicas send, and keep for backward, on a rank with known choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import attrs
from torch import Tensor

from ascend_run.ops.experts import hot_dispatcher
from ascend_run.ops.experts.hot_experts import HotChoice, hot_experts
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.saved_tensors import saved_bytes


def saved(runs: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> tuple[list[int], int]:
    """Return the bytes saved in each run, and the number of replicas over all of them."""
    replicas = 0

    def choose(counts_EX: Tensor, most: int) -> HotChoice:
        nonlocal replicas
        found = hot_experts(counts_EX, most)
        replicas += len(found.experts)
        return found

    with patch.object(hot_dispatcher, "hot_experts", choose):
        return saved_bytes(runs), replicas


def with_all_replicas(trial: Trial) -> RankOutcome:
    """Run a trial in which every forward replicates the first experts, as many as it may."""

    def choose(counts_EX: Tensor, most: int) -> HotChoice:
        return attrs.evolve(hot_experts(counts_EX, most), experts=tuple(range(most)))

    with patch.object(hot_dispatcher, "hot_experts", choose):
        return run_trial(trial)
