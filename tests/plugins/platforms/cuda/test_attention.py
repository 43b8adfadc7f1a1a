"""The CUDA kernel without a GPU: which operator gets which arguments, and which kernel each shape
uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.attention.visibility import Rectangle, Shape
from ascend_run.plugin_api import Dropout, Mask
from ascend_run.plugins.platforms.cuda import attention
from ascend_run.plugins.platforms.cuda.attention import Fused, FusedCudaAttention, choose
from tests.support.attention_problems import PROBLEMS, Problem, assert_same, check, run_kernel

KERNEL = FusedCudaAttention()
CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"

CANCELS = ("bias-of-queries",)
"""The gradient of a bias that all keys share is 0 up to rounding; float64 tests it."""


class Calls(TorchDispatchMode):
    """Counts the fused operators, and computes their results by plain arithmetic.

    It replaces the device: the arguments have been checked by the operators' own schemas. Causal
    rectangles must be square, because the operator aligns the corner itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stand_ins = {
            CUDNN: self.cudnn,
            f"{CUDNN}_backward": self.cudnn_backward,
            FLASH: self.flash,
            f"{FLASH}_backward": self.flash_backward,
            EFFICIENT: self.efficient,
            f"{EFFICIENT}_backward": self.efficient_backward,
        }
        name = function._opname
        if name not in stand_ins:
            return function(*args, **(kwargs or {}))
        self.seen[name] += 1
        return stand_ins[name](*args, **kwargs)

    def cudnn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        wants_lse: bool,
        p: float = 0.0,
        causal: bool = False,
        *,
        scale: float,
    ) -> Any:
        assert wants_lse
        out, lse = self.forward(q, k, v, bias, causal, scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def cudnn_backward(self, *tensors: Any, scale: float) -> Any:
        dout, q, k, v, out, lse, _, _, *nothing, lengths_q, lengths_k, _, causal = tensors
        assert nothing == [None] * 3
        assert (lengths_q, lengths_k) == (q.shape[2], k.shape[2])
        assert lse.shape == (*q.shape[:3], 1)
        return self.backward(dout, q, k, v, out, lse.squeeze(-1), None, causal, scale)

    def flash(
        self, q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *, scale: float
    ) -> Any:
        state = torch.zeros(0, dtype=torch.int64)
        lengths = q.shape[2], k.shape[2]
        out, lse = self.forward(q, k, v, None, causal, scale)
        return out, lse, None, None, *lengths, state, state, state

    def flash_backward(self, *tensors: Any, scale: float) -> Any:
        dout, q, k, v, out, lse, _, _, lengths_q, lengths_k, _, causal, _, _ = tensors
        assert (lengths_q, lengths_k) == (q.shape[2], k.shape[2])
        return self.backward(dout, q, k, v, out, lse, None, causal, scale)

    def efficient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        wants_lse: bool,
        p: float = 0.0,
        causal: bool = False,
        *,
        scale: float,
    ) -> Any:
        assert wants_lse
        assert q.shape[1] == k.shape[1]
        out, lse = self.forward(q, k, v, bias, causal, scale)
        padding = -lse.shape[-1] % 32
        return out, torch.nn.functional.pad(lse, (0, padding), value=torch.inf), None, None

    def efficient_backward(self, *tensors: Any, scale: float) -> Any:
        dout, q, k, v, bias, out, lse, _, _, _, wanted, *causal = tensors
        assert wanted == [True, True, True, False]
        assert lse.shape[-1] % 32 == 0
        lse = lse[..., : q.shape[2]]
        # torch's kernel is given out's strides of the batch and the heads, and assumes this one.
        batch_stride, head_stride, _, _ = out.stride()
        strides = (batch_stride, head_stride, out.shape[1] * out.shape[3], 1)
        out = out.as_strided(out.shape, strides)
        return *self.backward(dout, q, k, v, out, lse, bias, any(causal), scale), None

    def scores(self, q: Tensor, k: Tensor, bias: Any, causal: bool, scale: float) -> Tensor:
        assert q.shape[-1] % 8 == 0
        scores = scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        if causal:
            assert q.shape[2] == k.shape[2]
            scores += torch.full(scores.shape[2:], -torch.inf, dtype=torch.double).triu(1)
        if bias is not None:
            assert bias.stride(-2) % 16 == 0
            assert bias.shape == scores.shape
            scores += bias
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        scores = self.scores(q, k, *rest)
        v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1).float()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, times = rest[-1], q.shape[1] // k.shape[1]
        p = (self.scores(q, k, *rest) - lse.double().unsqueeze(-1)).exp()
        keys, values = (t.double().repeat_interleave(times, 1) for t in (k, v))
        dp = dout.double() @ values.mT
        ds = scale * p * (dp - (dout.double() * out.double()).sum(-1, keepdim=True))
        dk, dv = ds.mT @ q.double(), p.mT @ dout.double()
        dk, dv = (t.unflatten(1, (-1, times)).sum(2) for t in (dk, dv))
        return (ds @ keys).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@pytest.fixture
def calls() -> Iterator[Calls]:
    with Calls() as mode:
        yield mode


@pytest.mark.parametrize(
    ("dtype", "width", "shape", "wanted"),
    [
        (torch.bfloat16, 128, Shape.CAUSAL, Fused.FLASH),
        (torch.float16, 256, Shape.FULL, Fused.FLASH),
        (torch.bfloat16, 264, Shape.FULL, Fused.EFFICIENT),
        (torch.bfloat16, 128, Shape.BAND, Fused.EFFICIENT),
        (torch.float32, 128, Shape.CAUSAL, Fused.EFFICIENT),
    ],
    ids=str,
)
def test_the_kernel_is_the_fastest_that_takes_it(
    dtype: torch.dtype, width: int, shape: Shape, wanted: Fused
) -> None:
    assert choose(dtype, width, shape) is wanted


@pytest.mark.parametrize("name", PROBLEMS)
def test_float64_follows_the_formula_in_blocks(name: str, calls: Calls) -> None:
    check(KERNEL, PROBLEMS[name])
    assert not calls.seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in CANCELS])
def test_fused_operators_are_given_what_makes_the_formula(
    name: str, dtype: torch.dtype, calls: Calls
) -> None:
    problem = PROBLEMS[name]
    leaves, spec = problem.draw(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    extras = iter(exact[3:])
    exact_spec = attrs.evolve(
        spec,
        bias=None if spec.bias is None else next(extras),
        sinks=None if spec.sinks is None else next(extras),
    )
    shape = (problem.queries, problem.batch, problem.heads, problem.value_width)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = run_kernel(KERNEL, leaves, spec, dout)
    want = run_kernel(KERNEL, exact, exact_spec, dout.double())
    assert [t.dtype for t in got] == [dtype, torch.float32, *(leaf.dtype for leaf in leaves)]
    assert_same(got, want, 2e-5 if dtype is torch.float32 else 3e-2)
    plain = problem.bias is None and problem.softcap is None and not problem.positions
    fused = plain and name != "future-chunk"
    assert bool(calls.seen.total()) == fused
    if dtype is torch.float32:
        assert not calls.seen[FLASH]
    elif name == "causal":
        assert set(calls.seen) == {FLASH, f"{FLASH}_backward"}


LONG = {
    "causal": Problem(queries=256, keys=256),
    "one-head-of-keys": Problem(queries=128, keys=256, groups=1, heads_per_group=3),
    "not-causal": Problem(queries=128, keys=256, mask=Mask(causal=False)),
    "narrow-values": Problem(queries=128, keys=128, value_width=3),
    "more-queries": Problem(queries=256, keys=128),
}


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "prefers_cudnn", lambda device: True)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", LONG)
def test_cudnn_is_given_what_makes_the_formula(name: str, calls: Calls) -> None:
    leaves, spec = LONG[name].draw(torch.bfloat16)
    exact = [leaf.detach().double() for leaf in leaves]
    shape = (*leaves[0].shape[:3], leaves[2].shape[-1])
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = run_kernel(KERNEL, leaves, spec, dout)
    assert_same(got, run_kernel(KERNEL, exact, spec, dout.double()), 3e-2)
    assert {*calls.seen} == {CUDNN, f"{CUDNN}_backward"}


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("problem", "options", "operator"),
    [
        (Problem(queries=128, keys=128), {}, CUDNN),
        (Problem(queries=128, keys=128), {"cudnn": False}, FLASH),
        (Problem(queries=128, keys=128), {"flash": False}, EFFICIENT),
        (Problem(queries=128, keys=130, mask=Mask(causal=False)), {}, FLASH),
        (Problem(queries=120, keys=128, mask=Mask(causal=False)), {}, FLASH),
        (Problem(queries=128, keys=128, width=136), {}, FLASH),
        (Problem(queries=128, keys=128, mask=Mask(window=(9, 0))), {}, EFFICIENT),
    ],
    ids=str,
)
def test_cudnn_runs_where_it_is_wanted_and_its_plans_repeat(
    problem: Problem, options: dict[str, bool], operator: str, calls: Calls
) -> None:
    leaves, spec = problem.draw(torch.bfloat16)
    FusedCudaAttention(**options).forward(*(leaf.detach() for leaf in leaves), spec)
    assert {*calls.seen} == {operator}


@pytest.mark.usefixtures("_hopper")
def test_a_deterministic_run_does_not_use_cudnn(calls: Calls) -> None:
    leaves, spec = Problem(queries=128, keys=128).draw(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        KERNEL.forward(*(leaf.detach() for leaf in leaves), spec)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {*calls.seen} == {FLASH}


def test_a_processor_does_not_prefer_cudnn() -> None:
    assert not attention.prefers_cudnn(torch.device("cpu"))


def test_a_causal_rectangle_is_cut_to_a_square_and_the_rest() -> None:
    (square, rest) = attention._Rectangles(flash=True).cut(Rectangle(3, 10, 2, 6, Shape.CAUSAL))
    assert square == Rectangle(3, 7, 2, 6, Shape.CAUSAL)
    assert rest == Rectangle(7, 10, 2, 6, Shape.FULL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "both-windows", "more-keys", "narrow-values"])
def test_torchs_meta_kernels_return_the_shapes_of_the_contract(
    name: str, dtype: torch.dtype
) -> None:
    problem = PROBLEMS[name]
    leaves, spec = problem.draw(dtype)
    q, k, v = (leaf.detach().to("meta") for leaf in leaves)
    out, lse, saved = KERNEL.forward(q, k, v, spec)
    assert out.shape == (problem.queries, problem.batch, problem.heads, problem.value_width)
    assert lse.shape == (problem.batch, problem.heads, problem.queries)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    gradients = KERNEL.backward(out, q, k, v, out, lse, saved, spec)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert {g.dtype for g in gradients} == {dtype}


@pytest.mark.parametrize("options", [{"flash": False}, {"in_blocks": True}], ids=str)
def test_a_kernel_can_be_left_out(options: dict[str, bool], calls: Calls) -> None:
    leaves, spec = PROBLEMS["causal"].draw(torch.bfloat16)
    dout = torch.randn(12, 2, 4, 8).bfloat16()
    want = run_kernel(KERNEL, leaves, spec, dout)
    calls.seen.clear()
    assert_same(run_kernel(FusedCudaAttention(**options), leaves, spec, dout), want, 3e-2)
    assert set(calls.seen) == (
        {EFFICIENT, f"{EFFICIENT}_backward"} if "flash" in options else set()
    )


def test_dropout_is_replayed_from_its_seed() -> None:
    leaves, spec = Problem().draw(torch.float32)
    spec = attrs.evolve(spec, mask=Mask(), dropout=Dropout(probability=0.5, seed=3))
    q, k, v = (leaf.detach() for leaf in leaves)
    first, again = (KERNEL.forward(q, k, v, spec).out for _ in range(2))
    assert torch.equal(first, again)
