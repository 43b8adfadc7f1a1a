"""Attention kernels against the formula: a declared feature that one ignores is found."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import AttentionResult, AttentionSpec
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.gradients.formula import kernel_errors

TOLERANCE = 1e-10


class Ignores:
    """A kernel that ignores a field of the spec, or of its mask, in forward and backward."""

    def __init__(self, **changes: Any) -> None:
        self.inner, self.changes = FusedCpuAttention(), changes
        self.features = self.inner.features
        self.backward_reads = self.inner.backward_reads

    def forward(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> AttentionResult:
        return self.inner.forward(q, k, v, self.changed(spec))

    def backward(self, *arguments: Any) -> Any:
        *others, spec = arguments
        return self.inner.backward(*others, self.changed(spec))

    def changed(self, spec: AttentionSpec) -> AttentionSpec:
        if self.changes.keys() <= {"window", "document_ends"}:
            return attrs.evolve(spec, mask=attrs.evolve(spec.mask, **self.changes))
        return attrs.evolve(spec, **self.changes)


def test_a_right_kernel_computes_the_formula() -> None:
    errors = kernel_errors(FusedCpuAttention())

    assert len(errors) == 16
    assert all(error <= TOLERANCE for error in errors.values())


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"window": None}, {"a window", "softcap, sinks and window"}),
        ({"document_ends": None}, {"documents"}),
        ({"bias": None}, {"a bias", "a bias of heads and keys"}),
        ({"position_bias": None}, {"a position bias"}),
        ({"softcap": None}, {"a softcap", "softcap, sinks and window"}),
        ({"sinks": None}, {"sinks", "softcap, sinks and window"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_feature_that_is_ignored_is_found(changes: Any, problems: set[str]) -> None:
    errors = kernel_errors(Ignores(**changes))

    assert {label for label, error in errors.items() if error > TOLERANCE} == problems
