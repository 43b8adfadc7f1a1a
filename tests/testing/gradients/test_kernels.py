"""Attention kernels: each declared feature is compared, and a backward that lacks one is found."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import AttentionFeatures, AttentionResult, AttentionSpec
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.gradients.kernels import kernel_derivatives, problems_of


class Lacks:
    """A kernel whose backward ignores a field of the spec."""

    def __init__(self, **changes: Any) -> None:
        self.inner, self.changes = FusedCpuAttention(), changes
        self.features = self.inner.features
        self.backward_reads = self.inner.backward_reads

    def forward(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> AttentionResult:
        return self.inner.forward(q, k, v, spec)

    def backward(self, *arguments: Any) -> Any:
        *others, spec = arguments
        return self.inner.backward(*others, attrs.evolve(spec, **self.changes))


def wrong(kernel: Any) -> set[str]:
    """Problems with a wrong gradient."""
    found = list(kernel_derivatives(kernel))
    assert all(one.is_measured for one in found)
    return {one.of.partition(" with ")[2] for one in found if not one.agrees}


def test_a_right_kernel_agrees_in_each_problem() -> None:
    assert wrong(FusedCpuAttention()) == set()


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"softcap": None}, {"a softcap", "softcap, sinks and window"}),
        ({"dropout": None}, {"dropout"}),
        ({"position_bias": None}, {"a position bias"}),
    ],
    ids=["softcap", "dropout", "position bias"],
)
def test_a_backward_without_a_feature_is_found(changes: Any, problems: set[str]) -> None:
    assert wrong(Lacks(**changes)) == problems


def test_only_declared_features_are_compared() -> None:
    plain = [problem.label for problem in problems_of(AttentionFeatures())]
    assert plain == [
        "grouped queries",
        "one key-value head",
        "equal head counts",
        "no causal mask",
    ]
    every = AttentionFeatures.all_but()
    needed = {name for problem in problems_of(every) for name in problem.needs}
    assert needed == every.names()
    sharded = {name for problem in problems_of(every, num_ranks=2) for name in problem.needs}
    assert every.names() - sharded == {"bias", "packed", "unequal_lengths"}
