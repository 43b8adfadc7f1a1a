"""The implementations of an operator, and which of them a run selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.kernels import operator_kernels as kernels
from ascend_run.ops.kernels.compilers import missing_compiler
from ascend_run.plugins.platforms.cpu.operators import platform_ops
from tests.ops.elementwise import elementwise as check

EPS = 1e-5
SIZES = (2, 3, 4)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def swiglu(x: Tensor) -> Tensor:
    gate, up = x[..., :6], x[..., 6:]
    return gate / (1 + torch.exp(-gate)) * up


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(5).double(), torch.tensor([1.0, 0.1], dtype=torch.float64))
    whole = torch.cat((angles, angles), -1)
    return whole.cos(), whole.sin()


def rotary(x: Tensor) -> Tensor:
    """Rotate by complex multiplication."""
    cos, sin = (table[:, None, None, :2] for table in tables())
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), -1)


def split_qkv_rotary(mixed: Tensor) -> Tensor:
    """Return q, k and v concatenated in one tensor."""
    q, k, v = mixed.view(5, 2, 2, 5, 4).split((3, 1, 1), 3)
    parts = rotary(q.reshape(5, 2, 6, 4)), rotary(k.reshape(5, 2, 2, 4)), v.reshape(5, 2, 2, 4)
    return torch.cat(parts, 2)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda op: lambda x, w: op(x, w, EPS), rms_norm, ((5, 2, 8), (8,))),
    "swiglu": (lambda op: op, swiglu, ((5, 2, 12),)),
    "rotary": (lambda op: lambda x: op(x, *tables(), False), rotary, ((5, 2, 3, 4),)),
    "split_qkv_rotary": (
        lambda op: lambda x: torch.cat(op(x, *tables(), SIZES, False), 2),
        split_qkv_rotary,
        ((5, 2, 40),),
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own
@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["torch", "compile"])
@pytest.mark.parametrize("operator", CASES)
def test_each_form_follows_the_formula(operator: str, form: str) -> None:
    adapt, formula, shapes = CASES[operator]
    ours = adapt(kernels.in_form(operator, form))
    leaves = [check.draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    check.assert_equal_to_formula(ours, formula, leaves)


def test_the_compiled_form_is_a_graph_and_inside_a_graph_a_part_of_it() -> None:
    compiled = kernels.in_form("swiglu", "compile")
    x = check.draw(3, 12, seed=0)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        compiled(x)  # it compiles at the first call, which no longer may
    inside = torch.compile(lambda x: compiled(x) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(inside(x), swiglu(x) + 1, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("operator", "kernel", "device", "liger", "form"),
    [
        ("rms_norm", "auto", "cpu", True, "platform"),
        ("rms_norm", "auto", "npu", True, "platform"),
        ("rms_norm", "auto", "cuda", True, "liger"),
        ("rms_norm", "auto", "cuda", False, "compile"),
        ("swiglu", "auto", "cuda", True, "compile"),
        ("rotary", "auto", "cuda", True, "compile"),
        ("rms_norm", "torch", "cuda", True, "torch"),
        ("swiglu", "liger", "cuda", True, "liger"),
    ],
)
def test_the_form_is_the_asked_one_or_the_best_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    kernel: str,
    device: str,
    liger: bool,
    form: str,
) -> None:
    monkeypatch.setattr(kernels, "has_liger", lambda: liger)
    assert kernels.choose(operator, kernel, device) == form


def test_a_table_of_the_platforms_own_is_the_same_table() -> None:
    ops = platform_ops()
    assert kernels.replaced(ops, "auto", "cpu", "rms_norm", "swiglu", "rotary") is ops
    other = kernels.replaced(ops, "torch", "cpu", "swiglu")
    assert other.swiglu is not ops.swiglu
    assert other.rms_norm is ops.rms_norm


@pytest.mark.parametrize(
    ("kernel", "platform", "told"),
    [
        ("liger", "cpu", "is for platform cuda, not cpu"),
        ("liger", "cuda", "needs the package liger-kernel"),
        ("compile", "npu", "is not supported on platform npu"),
        ("compile", "cpu", "needs a C++ compiler"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_a_sentence_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, kernel: str, platform: str, told: str
) -> None:
    monkeypatch.setattr(kernels, "has_liger", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = kernels.problems("swiglu", kernel, platform)
    assert problem.startswith(f"swiglu: plugins.swiglu.kernel={kernel} {told}")
    assert "use auto" in problem


def test_what_can_be_had_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_liger", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
    assert missing_compiler() == ""
    for kernel, platform in (("auto", "npu"), ("torch", "npu"), ("compile", "cpu")):
        assert kernels.problems("swiglu", kernel, platform) == []
    assert kernels.problems("swiglu", "liger", "cuda") == []


def test_ligers_norm_leaves_float64_to_torch() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    got = kernels.in_form("rms_norm", "liger")(x, weight, EPS)
    torch.testing.assert_close(got, rms_norm(x, weight), rtol=1e-12, atol=1e-12)
