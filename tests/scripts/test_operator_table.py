"""The page of operators is fresh, and what it says of each is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.ops.kernels.catalog import OPERATORS, Operator
from ascend_run.plugins.platforms.cuda import forms as cuda
from ascend_run.plugins.platforms.npu.forms import FORMS
from scripts.operator_table import CUDA_FIELDS, NPU_FIELDS, PAGE, ROOT, page, proof

NAMES = {operator.name for operator in OPERATORS}


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/operator_table.py"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_each_operator_has_its_torch_form_and_a_suite(operator: Operator) -> None:
    form = operator.torch_form()
    assert form.__name__ == operator.name
    assert form.__doc__
    assert Path(ROOT / operator.suite_path).is_file()


def test_every_form_of_a_platform_is_of_an_operator() -> None:
    assert len(NAMES) == len(OPERATORS)
    forms = {*FORMS, *cuda.described(), *CUDA_FIELDS, *NPU_FIELDS}
    assert forms <= NAMES


def test_a_call_without_a_schema_is_reported() -> None:
    (ring,) = (o for o in OPERATORS if o.name == "ring_attention_update")
    with pytest.raises(ValueError, match=r"no schema of \['npu_ring_attention_update'\]"):
        proof(ring, {})
