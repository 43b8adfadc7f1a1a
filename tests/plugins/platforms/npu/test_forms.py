"""The NPU's implementation of each operator equals the torch one, gradients too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.attention import ring_update
from ascend_run.ops.elementwise import dropout_add_norm, ema_adamw
from ascend_run.ops.experts import feed_forward, group_lists, moe_permutation, quantised_matmul
from ascend_run.plugin_api import PlatformError
from ascend_run.plugins.platforms.npu.forms import FORMS
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
from ascend_run.testing.effects import count_operations
from ascend_run.testing.pool import GlooPool

from . import forms_jobs as jobs
from . import test_linear as linear_tests

SEEN: dict[str, set[str]] = {}
"""Implementation -> operators called so far in this process."""


@contextmanager
def operators_seen() -> Iterator[set[str]]:
    """Record operators called in the block: torch_npu's by name, torch's as ``torch.name``."""
    seen: set[str] = set()
    with recorded_calls() as recorder, count_operations() as operations:
        yield seen
    seen.update(call.operator for call in recorder.calls)
    seen.update(f"torch.{name}" for name in operations)


def note(name: str, seen: set[str]) -> None:
    """Check that an implementation calls no operator of torch_npu but those that it declares."""
    of_npu = {call for call in seen if not call.startswith("torch.")}
    assert of_npu <= {*FORMS[name].calls}, name
    SEEN.setdefault(name, set()).update(seen)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()


def integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """Compare, relative to the largest value."""
    if not isinstance(theirs, Tensor):
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, tolerance)
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    if theirs.numel():
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def same(torch_form: Callable[..., Any], *leaves: Tensor, **options: Any) -> None:
    """Compare the result and the gradients of a random sum of it to those of torch."""
    name = torch_form.__name__
    results = []
    for form in (FORMS[name].function, torch_form):
        copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with operators_seen() as seen:
            result = form(*copies, **options)
            outputs = [result] if isinstance(result, Tensor) else list(result)
            outputs = [out for out in outputs if isinstance(out, Tensor)]
            learning = [out for out in outputs if out.requires_grad]
            wanted = [copy for copy in copies if copy.requires_grad]
            gradients: tuple[Tensor, ...] = ()
            if learning:
                # Non-contiguous upstream gradients.
                shapes = [reversed(out.shape) for out in learning]
                upstream = [draw(*s, seed=77).detach() for s in shapes]
                upstream = [u.permute(*reversed(range(u.dim()))) for u in upstream]
                gradients = torch.autograd.grad(learning, wanted, upstream)
        if form is not torch_form:
            note(name, seen)
        results.append(([out.detach() for out in outputs], gradients))
    close(*results)


PARTS: dict[str, tuple[int, ...]] = {"rowscale": (5, 3), "layerscale_H": (8,)}


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("scales", [(), ("rowscale",), ("rowscale", "layerscale_H")], ids="+".join)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_dropout_add_norm(norm: str, scales: tuple[str, ...], with_bias: bool) -> None:
    operator = getattr(dropout_add_norm, f"dropout_add_{norm}")
    mask = draw(5, 3, 8, seed=9) > 0

    def call(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, residual: Tensor, weight: Tensor, *rest: Tensor) -> Any:
            given = dict(zip(scales, rest[with_bias:], strict=True))
            bias = rest[0] if with_bias else None
            return form(x, residual, weight, bias, 0.5, 1e-5, mask=mask, **given)[:2]

        run.__name__ = operator.__name__
        return run

    leaves = [draw(5, 3, 8, seed=0), draw(5, 3, 8, seed=1), draw(8, seed=2)]
    leaves += [draw(8, seed=3)] * with_bias + [draw(*PARTS[s], seed=4) for s in scales]
    _same_through(call, operator, leaves)


def _same_through(
    call: Callable[[Callable[..., Any]], Callable[..., Any]],
    operator: Callable[..., Any],
    leaves: list[Tensor],
) -> None:
    """Run ``same`` for implementations whose tensors are not consecutive arguments."""
    form = FORMS[operator.__name__].function
    ours, theirs = call(form), call(operator)
    results = []
    for run in (ours, theirs):
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        with operators_seen() as seen:
            outputs = run(*copies)
            total = sum((out * draw(*out.shape, seed=77).detach()).sum() for out in outputs)
            gradients = torch.autograd.grad(total, copies)
        if run is ours:
            note(operator.__name__, seen)
        results.append(([out.detach() for out in outputs], gradients))
    close(*results)


def test_a_residual_of_another_dtype_is_the_torch_form() -> None:
    x, residual = draw(4, 8, seed=0, dtype=torch.bfloat16), draw(4, 8, seed=1)
    for operator in (
        dropout_add_norm.dropout_add_layer_norm,
        dropout_add_norm.dropout_add_rms_norm,
    ):
        form = FORMS[operator.__name__].function
        for given in (residual, None):
            close(*(f(x, given, torch.ones(8), None, 0.0, 1e-5)[:2] for f in (form, operator)))


COUNTS = [(3, 0, 4, 2), (0, 0, 5, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("cumulative", [True, False], ids=["totals", "counts"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_products(counts: tuple[int, ...], cumulative: bool) -> None:
    rows = sum(counts)
    entries = torch.tensor(counts)
    options = {"group_list": entries.cumsum(0) if cumulative else entries, "cumulative": cumulative}
    same(group_lists.listed_grouped_matmul, draw(rows, 5, seed=0), draw(4, 5, 6, seed=1), **options)
    same(group_lists.listed_grouped_outer, draw(rows, 5, seed=0), draw(rows, 6, seed=1), **options)
    options["group_list"] = options["group_list"].tolist()

    def biased(form: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, w, b: [form(x, w.mT, **options, bias_XN=b)]

    leaves = [draw(rows, 5, seed=0), draw(4, 6, 5, seed=1), draw(4, 6, seed=2)]
    _same_through(biased, group_lists.listed_grouped_matmul, leaves)
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (draw(rows, n, seed=n, dtype=dtype).detach() for n in (5, 6))
        same(group_lists.grouped_matmul_add_, draw(4, 5, 6, seed=3).detach(), a, b, **options)


@pytest.mark.parametrize("learns", [0, 1], ids=["rows alone", "matrices alone"])
def test_an_unneeded_gradient_is_not_computed(learns: int) -> None:
    """One matmul in backward, not two."""
    leaves = [draw(9, 5, seed=0), draw(4, 5, 6, seed=1)]
    leaves[1 - learns].requires_grad_(False)
    groups = torch.tensor(COUNTS[0])
    same(group_lists.listed_grouped_matmul, *leaves, group_list=groups, cumulative=False)
    form = FORMS["listed_grouped_matmul"].function
    with recorded_calls() as recorder:
        form(*leaves, groups, cumulative=False).sum().backward()
    assert recorder.calls.total() == 2


def test_a_list_on_the_host_is_checked() -> None:
    with pytest.raises(ValueError, match="end with 5"):
        FORMS["listed_grouped_matmul"].function(
            draw(5, 2, seed=0), draw(2, 2, 2, seed=1), [3, 4], cumulative=True
        )


EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])


@pytest.mark.parametrize("kept", [None, 6, -3], ids=str)
def test_token_permutation(kept: int | None) -> None:
    same(moe_permutation.moe_token_permute, draw(5, 4, seed=0), EXPERTS, num_out_tokens=kept)
    _, places = moe_permutation.moe_token_permute(draw(5, 1, seed=0), EXPERTS)
    rows = draw(10 if kept is None else range(10)[kept], 4, seed=1)
    same(moe_permutation.moe_token_unpermute, rows, places, draw(5, 2, seed=2))
    same(moe_permutation.moe_token_unpermute, rows, places)


def test_padded_experts_are_the_torch_form() -> None:
    chosen = torch.tensor([[0, 3], [1, 3], [4, 0]])
    same(moe_permutation.moe_token_permute, draw(5, 4, seed=0), chosen, padded_mode=True)
    leaves = draw(6, 4, seed=1), chosen, draw(3, 2, seed=2)
    same(moe_permutation.moe_token_unpermute, *leaves, padded_mode=True, restore_shape=(5, 4))


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_ring_update(layout: str) -> None:
    packed = layout == "TND"
    outs = [draw(*((6, 3, 4) if packed else (6, 2, 12)), seed=s).detach() for s in (0, 1)]
    shape = (6, 3, 1) if packed else (2, 3, 6, 1)
    largest = [(9 * draw(*shape, seed=s).detach()).repeat_interleave(8, -1) for s in (2, 3)]
    total = [(draw(*shape, seed=s).detach().abs() + 1).repeat_interleave(8, -1) for s in (4, 5)]
    for side, query in ((0, 1), (1, 2), (0, 3), (1, 3)):  # queries without keys; 3 on both sides
        index = (query,) if packed else (slice(None), slice(None), query)
        largest[side][index], total[side][index], outs[side][query] = -torch.inf, 0.0, 0.0
    triples = [t for side in (0, 1) for t in (outs[side], largest[side], total[side])]
    form, torch_form = FORMS["ring_attention_update"].function, ring_update.ring_attention_update
    with operators_seen() as seen:
        got = form(*triples, layout=layout)
    note("ring_attention_update", seen)
    want = torch_form(*triples, layout=layout)
    assert torch.equal(got.softmax_max, want.softmax_max)
    close([got.out, got.softmax_sum], [want.out, want.softmax_sum])
    with pytest.raises(RuntimeError, match="ring_attention_update has no backward"):
        form(draw(*outs[0].shape, seed=0), *triples[1:])


@pytest.mark.parametrize("decoupled", [True, False])
def test_ema_adamw(decoupled: bool) -> None:
    def run(step_: Callable[..., None]) -> list[Tensor]:
        params, grads = draw(7, seed=0).detach(), draw(7, seed=1).detach()
        first, second, average = torch.zeros(7), torch.zeros(7), params.clone()
        for step in (1, 2, 3):
            lists = [[t] for t in (params, grads, first, second, average)]
            options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "ema_decay": 0.9}
            step_(*lists, step=step, weight_decay=0.1, decoupled=decoupled, **options)
        return [params, first, second, average]

    with operators_seen() as seen:
        got = run(FORMS["ema_adamw_step_"].function)
    note("ema_adamw_step_", seen)
    close(got, run(ema_adamw.ema_adamw_step_))


SIZES = [3, 0, 4]
EIGHTHS = torch.arange(1, 11, dtype=torch.float32) / 4096
"""Scales that bfloat16 and the encoding of integers represent exactly."""


@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh", "fastgelu", "silu"], ids=str)
def test_quantised_products(output_dtype: torch.dtype, activation: str | None) -> None:
    if output_dtype is torch.int8 and activation:
        activation = None
    operands = integers(7, 16, seed=0), integers(3, 16, 10, seed=1), EIGHTHS.expand(3, 10)
    options = {"activation": activation, "output_dtype": output_dtype, "cumulative": False}
    bias = integers(3, 10, seed=2).int()
    per_token = None if output_dtype is torch.int8 else torch.arange(7) / 8 + 0.5
    for more in ({}, {"per_token_scale_T": per_token, "bias_XN": bias}):
        same(
            quantised_matmul.quant_grouped_matmul, *operands, torch.tensor(SIZES), **options, **more
        )


def test_products_of_int8_matrices() -> None:
    x, matrices = draw(7, 16, seed=0).detach(), integers(3, 16, 10, seed=1)
    scale, offset, bias = (draw(3, 10, seed=seed).detach() for seed in (2, 3, 4))
    operator = quantised_matmul.weight_quant_grouped_matmul
    for given in (offset, None):
        arguments = (x, matrices, scale, given, SIZES)
        form = FORMS["weight_quant_grouped_matmul"].function
        with operators_seen() as seen:
            got = form(*arguments, cumulative=False, bias_XN=bias)
        note("weight_quant_grouped_matmul", seen)
        close(got, operator(*arguments, cumulative=False, bias_XN=bias))


@pytest.mark.parametrize("experts", [None, SIZES], ids=["dense", "experts"])
@pytest.mark.parametrize("activation", ["fastgelu", "gelu", "relu", "silu", "swiglu"])
def test_feed_forwards(experts: list[int] | None, activation: str) -> None:
    lead = (3,) if experts else ()
    width = 20 if activation == "swiglu" else 10
    x = draw(7, 6, seed=0).detach()
    w1, w2 = draw(*lead, 6, width, seed=1).detach(), draw(*lead, 10, 6, seed=2).detach()
    b1, b2 = draw(*lead, width, seed=3).detach(), draw(*lead, 6, seed=4).detach()
    same(feed_forward.ffn, x, w1, w2, activation=activation, bias1=b1, bias2=b2, experts=experts)
    if activation == "swiglu":
        return
    x8, w8, v8 = (
        integers(7, 6, seed=5),
        integers(*lead, 6, 10, seed=6),
        integers(*lead, 10, 6, seed=7),
    )
    scale = torch.ones(lead or (1,))
    same(
        feed_forward.quantised_ffn,
        x8,
        w8,
        v8,
        activation=activation,
        scale=16 * scale,
        offset=2 * scale,
        deq_scale1=EIGHTHS.expand(*lead, 10) / 8,
        deq_scale2=EIGHTHS[:6].expand(*lead, 6),
        bias1=integers(*lead, 10, seed=8).int(),
        bias2=None,
        experts=experts,
    )
    same(
        feed_forward.weight_quantised_ffn,
        x,
        w8,
        v8,
        activation=activation,
        antiquant_scale1=draw(*lead, 10, seed=9).detach() / 64,
        antiquant_scale2=draw(*lead, 6, seed=10).detach() / 64,
        antiquant_offset2=draw(*lead, 6, seed=11).detach(),
        experts=experts,
    )


def test_bfloat16_scales_go_with_a_bfloat16_output() -> None:
    x, w1, w2 = integers(7, 6, seed=5), integers(6, 10, seed=6), integers(10, 6, seed=7)
    same(
        feed_forward.quantised_ffn,
        x,
        w1,
        w2,
        activation="relu",
        scale=torch.ones(10),
        offset=torch.zeros(1),
        deq_scale1=EIGHTHS,
        deq_scale2=EIGHTHS[:6],
        output_dtype=torch.bfloat16,
    )


def test_what_the_operators_do_not_have_is_refused() -> None:
    x, w = integers(7, 6, seed=0), integers(1, 6, 6, seed=1)
    ones = torch.ones(6)
    scales = {"scale": ones, "offset": ones[:1], "deq_scale1": ones, "deq_scale2": ones}
    with pytest.raises(
        PlatformError, match=r"no output dtype torch\.float32; use float16, bfloat16, int8"
    ):
        FORMS["quant_grouped_matmul"].function(
            x, w, ones[None], [7], cumulative=True, output_dtype=torch.float32
        )
    with pytest.raises(PlatformError, match="has no activation 'swiglu'; use fastgelu, gelu"):
        FORMS["quantised_ffn"].function(x, w[0], w[0], "swiglu", **scales)
    scales["scale"] = ones.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="quantised_ffn has no backward"):
        FORMS["quantised_ffn"].function(x, w[0], w[0], "relu", **scales)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("wide", torch.float32, 1e-6),
        ("group", torch.float32, 1e-6),
        ("channel", torch.float32, 1e-6),
        ("int8", torch.float16, 2e-3),  # one float16 rounding more or less
    ],
    ids=["wide", "group", "channel", "int8"],
)
def test_products_summed_over_ranks(
    gloo_pool: GlooPool, kind: str, dtype: torch.dtype, tolerance: float, in_place: bool
) -> None:
    for difference, seen in gloo_pool.run(jobs.add_rms_norm, 2, kind, dtype, in_place):
        assert difference < tolerance
        note(f"mm_all_reduce_add_rms_norm{'_' * in_place}", seen)


@pytest.mark.parametrize("split_item", range(4))
def test_groups_summed_over_ranks(gloo_pool: GlooPool, split_item: int) -> None:
    for difference, seen in gloo_pool.run(jobs.grouped, 2, split_item):
        assert difference < 1e-6
        note("grouped_matmul_all_reduce", seen)


def test_no_rows_at_all_are_no_product(gloo_pool: GlooPool) -> None:
    for difference, seen in gloo_pool.run(jobs.grouped, 2, 0, (0, 0, 0)):
        assert (difference, seen) == (0.0, set())


def test_each_form_calls_every_operator_that_it_declares(gloo_pool: GlooPool) -> None:
    """Runs as few of the tests above as cover all of them; the tests of linears, and of memory of
    the host, check their own."""
    SEEN.clear()
    test_dropout_add_norm("layer_norm", (), True)
    test_dropout_add_norm("rms_norm", (), True)
    test_grouped_products(COUNTS[0], True)
    test_token_permutation(None)
    test_ring_update("SBH")
    for decoupled in (True, False):
        test_ema_adamw(decoupled)
    test_quantised_products(torch.int8, None)
    test_products_of_int8_matrices()
    test_feed_forwards(None, "relu")
    for in_place in (False, True):
        for case in (("wide", torch.float32, 1e-6), ("int8", torch.float16, 2e-3)):
            test_products_summed_over_ranks(gloo_pool, *case, in_place)
    test_groups_summed_over_ranks(gloo_pool, 0)
    assert {*SEEN, *linear_tests.PRODUCTS, "matmul_add_fp32", "HostMapped"} == FORMS.keys()
    for name, seen in SEEN.items():
        assert seen >= {*FORMS[name].calls}, name
