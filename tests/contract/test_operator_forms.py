"""A platform's form of an operator has the signature of its torch form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ascend_run.ops.kernels.catalog import OPERATORS
from ascend_run.plugin_api import GroupedGemm
from ascend_run.plugins.platforms.cuda import forms as cuda
from ascend_run.plugins.platforms.npu import forms as npu
from ascend_run.plugins.platforms.npu import platform_ops as npu_operators

TORCH_FORMS = {operator.name: operator.torch_form() for operator in OPERATORS}
FIELDS = ("rms_norm", "swiglu", "rotary")
"""Of ``PlatformOps``; called by position."""


@pytest.mark.parametrize(
    ("table", "without"),
    [
        (
            npu.fused(),
            {*FIELDS, "grouped_matmul", *(n for n in TORCH_FORMS if "bmm" in n)},
        ),
        (cuda.fused(), None),
    ],
    ids=["npu", "cuda"],
)
def test_a_form_has_the_signature_of_the_torch_form(
    table: Mapping[str, Callable[..., Any]], without: set[str] | None
) -> None:
    for name, form in table.items():
        assert inspect.signature(form) == inspect.signature(TORCH_FORMS[name]), name
    if without is not None:
        assert TORCH_FORMS.keys() - table.keys() == without, "these have no form of their own"


@pytest.mark.parametrize("name", FIELDS)
def test_what_has_a_field_of_its_own_takes_as_many_arguments_by_position(name: str) -> None:
    ours, torch_form = (
        [p.kind for p in inspect.signature(f).parameters.values()]
        for f in (getattr(npu_operators, name), TORCH_FORMS[name])
    )
    assert ours == torch_form
    assert {*ours} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("method", ["__init__", "matmul", "outer", "add_outer"])
def test_grouped_products_have_the_methods_of_the_contract(method: str) -> None:
    ours, contract = (
        inspect.signature(getattr(owner, method))
        for owner in (npu_operators.NpuGroups, GroupedGemm)
    )
    assert [*ours.parameters] == [*contract.parameters]
    assert ours == contract
