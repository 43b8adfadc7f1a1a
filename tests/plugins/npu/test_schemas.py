"""The plugin's calls against what torch_npu itself said of them (tools/npu_schemas.py).

The reference operators are defined with torch_npu's schemas, so a call that runs here has arguments
that torch_npu takes; and they answer the shapes and dtypes that its meta kernels answer.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import ascend_run
from ascend_run.plugins.npu.proof.answers import describe
from tests.support.npu_calls import UnprovenCall
from tools.npu_schemas import operators_called

from .calls import CALLS
from .reference import RECORD

PACKAGE = Path(ascend_run.__file__).parent
OTHERWISE_DOCUMENTED = {
    "attention v2 TND full forward": [[[10, 4, 8], "float32"]] * 2,
    "attention v2 BSND full forward": [[[2, 4, 6, 8], "float32"]] * 2,
}
"""Answers where torch_npu's documentation stands against its meta kernel, which takes [T, N, D] and
[B, S, N, D] for [B, N, S, D]: statistics are [T, N, 8] and [B, N, S, 8]."""


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_taken_and_answered_as_torch_npu_does(name: str) -> None:
    answer = describe(CALLS[name](torch.device("cpu")))
    recorded = RECORD["meta"][name]
    if recorded is None:
        assert RECORD["without_meta"][name], "torch_npu's meta kernel is at fault, or there is none"
    elif name in OTHERWISE_DOCUMENTED:
        assert recorded[0] == json.loads(json.dumps(answer))[0]
        assert json.loads(json.dumps(answer))[1:] == OTHERWISE_DOCUMENTED[name]
    else:
        assert json.loads(json.dumps(answer)) == recorded


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
    assert {path.rpartition("/")[0] for path in naming} == {"plugins/npu/operators"}


def test_an_argument_that_torch_npu_does_not_have_is_refused() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(UnprovenCall, match="npu_rms_norm has no argument 'eps'"):
        torch.ops.npu.npu_rms_norm(x, weight, eps=1e-5)
