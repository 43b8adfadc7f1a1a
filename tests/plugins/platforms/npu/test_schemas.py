"""The plugin's calls against the record of torch_npu itself (scripts/npu_schemas.py).

The reference operators are defined with torch_npu's schemas, so torch_npu accepts the arguments of
a call that runs here; and they return the shapes and dtypes of its meta kernels.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import ascend_run
from ascend_run.plugins.platforms.npu.proof.meta_results import describe
from scripts.npu_schemas import operators_called
from tests.support.npu_calls import UnprovenCall

from .calls import CALLS
from .reference import RECORD

PACKAGE = Path(ascend_run.__file__).parent
OTHERWISE_DOCUMENTED = {
    "attention v2 TND full forward": [[[10, 4, 8], "float32"]] * 2,
    "attention v2 BSND full forward": [[[2, 4, 6, 8], "float32"]] * 2,
}
"""Results whose documentation contradicts torch_npu's meta kernel, which takes [T, N, D] and [B, S,
N, D] for [B, N, S, D]: statistics are [T, N, 8] and [B, N, S, 8]."""


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_accepted_with_the_results_of_torch_npu(name: str) -> None:
    result = describe(CALLS[name](torch.device("cpu")))
    recorded = RECORD["meta"][name]
    if recorded is None:
        assert RECORD["without_meta"][name], "torch_npu's meta kernel is at fault, or there is none"
    elif name in OTHERWISE_DOCUMENTED:
        assert recorded[0] == json.loads(json.dumps(result))[0]
        assert json.loads(json.dumps(result))[1:] == OTHERWISE_DOCUMENTED[name]
    else:
        assert json.loads(json.dumps(result)) == recorded


def test_the_record_is_of_these_operators_and_calls() -> None:
    assert list(operators_called()) == sorted(RECORD["schemas"])
    assert sorted(CALLS) == sorted(RECORD["meta"])


def test_operators_are_called_in_one_package_only() -> None:
    naming = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "proof"  # which stands in their place, and asks them on meta tensors
        and any(
            isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops.npu")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert {path.rpartition("/")[0] for path in naming} == {"plugins/platforms/npu/operators"}


def test_an_argument_that_torch_npu_does_not_have_is_refused() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(UnprovenCall, match="npu_rms_norm has no argument 'eps'"):
        torch.ops.npu.npu_rms_norm(x, weight, eps=1e-5)
