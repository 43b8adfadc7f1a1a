"""The experts' MLP against a loop over tokens, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.experts.expert_mlp import CACHE_ELEMENTS, expert_mlp
from ascend_run.ops.experts.grouped_matmul import GROUPS, Backend, Counts, MakeGroups
from ascend_run.testing.effects import count_operations
from ascend_run.types.moe import GroupedGemm

H, WIDTH = 8, 16
COUNTS = [5, 0, 1, 7]
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool]] = {
    "swiglu": (F.silu, True, True),
    "silu-by-autograd": (F.silu, True, False),
    "geglu": (F.gelu, True, False),
    "plain-gelu": (F.gelu, False, False),
    "plain-silu": (F.silu, False, True),
}


def leaves(
    counts: Sequence[int], gated: bool, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor]:
    """Return [tokens, probs, fc1, fc2] that require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    total, experts, rows = sum(counts), len(counts), WIDTH * (2 if gated else 1)
    inputs = [
        draw(total, H),
        draw(total).abs(),
        draw(experts, rows, H),
        draw(experts, H, WIDTH),
    ]
    return [x.requires_grad_() for x in inputs], draw(total, H)


def token_by_token(
    inputs: list[Tensor],
    counts: Sequence[int],
    function: Callable[[Tensor], Tensor],
    gated: bool,
) -> Tensor:
    tokens, probs, fc1, fc2 = inputs
    expert_of = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = []
    for token, prob, expert in zip(tokens, probs, expert_of, strict=True):
        hidden = fc1[expert] @ token
        hidden = function(hidden[:WIDTH]) * hidden[WIDTH:] if gated else function(hidden)
        rows.append(fc2[expert] @ (hidden * prob))
    return torch.stack(rows)


def error(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    return ((result.double() - expected.double()).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("backend", ["loop", "bmm", None])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_output_and_every_gradient_are_those_of_each_token(
    name: str, backend: Backend | None
) -> None:
    function, gated, is_silu = ACTIVATIONS[name]
    inputs, dy = leaves(COUNTS, gated)
    out = expert_mlp(
        inputs[0],
        COUNTS,
        *inputs[1:],
        function=function,
        gated=gated,
        is_silu=is_silu,
        backend=backend,
    )
    gradients = torch.autograd.grad(out, inputs, dy)
    plain = token_by_token(inputs, COUNTS, function, gated)
    expected = torch.autograd.grad(plain, inputs, dy)
    assert error(out.detach(), plain.detach()) <= 1e-10
    for result, right in zip(gradients, expected, strict=True):
        assert error(result, right) <= 1e-10


def test_an_operator_of_the_full_activation_replaces_it() -> None:
    widths = []

    def fused(gate_up: Tensor) -> Tensor:
        widths.append(gate_up.shape[1])
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    inputs, dy = leaves(COUNTS, gated=True)
    out = expert_mlp(inputs[0], COUNTS, *inputs[1:], fused=fused)
    gradients = torch.autograd.grad(out, inputs, dy)
    assert widths == [2 * WIDTH] * 2, "forward, and again in backward"
    plain = token_by_token(inputs, COUNTS, F.silu, True)
    assert error(out.detach(), plain.detach()) <= 1e-10
    for result, right in zip(gradients, torch.autograd.grad(plain, inputs, dy), strict=True):
        assert error(result, right) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["grouped_mm", "bmm", "loop"])
def test_every_backend_agrees_with_the_formula_in_lower_precision(
    backend: Backend, dtype: torch.dtype
) -> None:
    # Some dozens of matmuls round once each; their error stays below 16 eps of the dtype.
    tolerance = 16 * torch.finfo(dtype).eps
    inputs, dy = leaves(COUNTS, gated=True, dtype=dtype)
    out = expert_mlp(inputs[0], COUNTS, *inputs[1:], backend=backend)
    gradients = torch.autograd.grad(out, inputs, dy)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    plain = token_by_token(exact, COUNTS, F.silu, True)
    expected = torch.autograd.grad(plain, exact, dy.double())
    assert error(out.detach(), plain.detach()) <= tolerance
    for result, right in zip(gradients, expected, strict=True):
        assert result.dtype == dtype
        assert error(result, right) <= tolerance


def test_probabilities_may_be_of_a_wider_type_than_the_tokens() -> None:
    inputs, dy = leaves(COUNTS, gated=True, dtype=torch.bfloat16)
    inputs[1] = inputs[1].detach().float().requires_grad_()
    out = expert_mlp(inputs[0], COUNTS, *inputs[1:])
    out.backward(dy)
    assert out.dtype == torch.bfloat16
    assert inputs[1].grad is not None
    assert inputs[1].grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["loop", "bmm", "grouped_mm"])
def test_an_expert_without_tokens_receives_zeros(backend: Backend) -> None:
    inputs, dy = leaves(COUNTS, gated=True, dtype=torch.float32)
    expert_mlp(inputs[0], COUNTS, *inputs[1:], backend=backend).backward(dy)
    for weight in inputs[2:]:
        assert weight.grad is not None
        assert not weight.grad[1].any()
        assert weight.grad[0].any()


def test_a_rank_without_tokens_still_gives_gradients_of_zeros() -> None:
    inputs, dy = leaves([0, 0], gated=True)
    out = expert_mlp(inputs[0], [0, 0], *inputs[1:])
    out.backward(dy)
    assert out.shape == (0, H)
    for weight in inputs[2:]:
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.parametrize(
    ("dtype", "backend", "chosen"),
    [
        (torch.float32, None, "_grouped_mm"),
        (torch.bfloat16, None, "_grouped_mm"),
        (torch.bfloat16, "grouped_mm", "_grouped_mm"),
        (torch.float64, None, "mm"),  # torch cannot group these: the counts are read
    ],
    ids=str,
)
def test_counts_on_the_device_give_the_results_of_counts_on_the_host(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, backend: Backend | None, chosen: str
) -> None:
    reads, read = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(x) or read(x))
    inputs, dy = leaves(COUNTS, gated=True, dtype=dtype)
    biases = [torch.randn(4, 2 * WIDTH), torch.randn(4, H)]
    inputs += [bias.to(dtype).requires_grad_() for bias in biases]
    results = []
    for counts in (COUNTS, torch.tensor(COUNTS)):
        with count_operations() as seen:
            host = "grouped_mm" if chosen == "_grouped_mm" else "loop"
            out = expert_mlp(
                inputs[0],
                counts,
                *inputs[1:],
                backend=backend if isinstance(counts, Tensor) else host,
            )
            results.append([out.detach(), *torch.autograd.grad(out, inputs, dy)])
        if isinstance(counts, Tensor):
            assert seen[chosen] >= 6
            assert seen["_local_scalar_dense"] == 0
            assert len(reads) == (0 if chosen == "_grouped_mm" else 1)
    *expected, fc1_bias, fc2_bias = results[0]
    *found, fc1_sums, fc2_sums = results[1]
    assert all(torch.equal(result, right) for result, right in zip(found, expected, strict=True))
    for result, right in ((fc1_sums, fc1_bias), (fc2_sums, fc2_bias)):
        assert error(result, right) <= 16 * torch.finfo(dtype).eps
        assert not result[1].any()


Operands = list[tuple[Tensor, Tensor]]


def recorded(backend: Backend, operands: Operands) -> MakeGroups:
    """Return the backend, and add the operands of each product that it adds to a sum."""

    def make(counts: Counts, device: torch.device) -> GroupedGemm:
        groups = GROUPS[backend](counts, device)
        add_outer = groups.add_outer

        def record(sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
            operands.append((a_TN.clone(), b_TK.clone()))
            add_outer(sum_XNK, a_TN, b_TK)

        groups.add_outer = record  # type: ignore[method-assign]
        return groups

    return make


def exact_products(a_TN: Tensor, b_TK: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's product in float64, and how far what is added to ``start`` may be off.

    The product may be rounded once to its operands' dtype: by half an eps of its value. Its terms
    are added in float32 before, and to ``start`` after: each term is rounded by half an eps of
    float32 as often as there are rows at most, and once more.
    """
    groups = list(zip(a_TN.double().split(COUNTS), b_TK.double().split(COUNTS), strict=True))
    exact = torch.stack([a.t() @ b for a, b in groups])
    terms = start.double().abs() + torch.stack([a.abs().t() @ b.abs() for a, b in groups])
    summed = (max(COUNTS) + 1) * torch.finfo(torch.float32).eps / 2 * terms
    once = torch.finfo(a_TN.dtype).eps / 2 * (exact.abs() + summed)
    return exact, once + summed


@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "wider"])
@pytest.mark.parametrize("backend", ["loop", "bmm", "grouped_mm"])
def test_weight_gradients_accumulate_in_an_existing_main_gradient(
    backend: Backend, wide: bool
) -> None:
    dtype = torch.bfloat16 if wide else torch.float32
    inputs, dy = leaves(COUNTS, gated=True, dtype=dtype)
    plain = torch.autograd.grad(
        expert_mlp(inputs[0], COUNTS, *inputs[1:], backend=backend), inputs, dy
    )
    start = {}
    for weight in inputs[2:]:
        weight.main_grad = torch.randn(weight.shape)  # type: ignore[attr-defined]
        start[weight] = weight.main_grad.clone()  # type: ignore[attr-defined]
    operands: Operands = []
    own = recorded(backend, operands)
    expert_mlp(inputs[0], COUNTS, *inputs[1:], backend=own, accumulate=True).backward(dy)
    for leaf, gradient in zip(inputs, plain, strict=True):
        if leaf not in start:
            assert torch.equal(leaf.grad, gradient)  # type: ignore[arg-type]
            continue
        assert leaf.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert leaf.grad is not None  # data parallelism waits for it
        added = leaf.main_grad.double() - start[leaf].double()  # type: ignore[attr-defined]
        exact, bound = exact_products(*operands.pop(), start[leaf])  # fc2's came first
        for result in (added, gradient.double()):
            assert ((result - exact).abs() <= bound).all()
    assert not operands


def test_without_a_main_gradient_there_is_an_ordinary_one() -> None:
    inputs, dy = leaves(COUNTS, gated=True)
    expert_mlp(inputs[0], COUNTS, *inputs[1:], accumulate=True).backward(dy)
    plain, _ = leaves(COUNTS, gated=True)
    expert_mlp(plain[0], COUNTS, *plain[1:]).backward(dy)
    for leaf, expected in zip(inputs, plain, strict=True):
        assert torch.equal(leaf.grad, expected.grad)  # type: ignore[arg-type]


def test_frozen_weights_cost_no_gradient_and_keep_no_tokens() -> None:
    def gradients(*, trained: bool) -> list[Tensor]:
        inputs, dy = leaves(COUNTS, gated=True)
        for weight in inputs[2:]:
            weight.requires_grad_(trained)
        kept: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = expert_mlp(inputs[0], COUNTS, *inputs[1:])
        out.backward(dy)
        assert (inputs[0].data_ptr() in kept) is trained
        assert (inputs[2].grad is not None) is trained
        return [x.grad for x in inputs[:2] if x.grad is not None]

    for found, expected in zip(gradients(trained=False), gradients(trained=True), strict=True):
        assert torch.equal(found, expected)


def test_blocks_of_rows_give_the_bits_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        inputs, dy = leaves(COUNTS, gated=True, dtype=torch.float32)
        out = expert_mlp(inputs[0], COUNTS, *inputs[1:])
        return [out.detach(), *torch.autograd.grad(out, inputs, dy)]

    assert sum(COUNTS) * WIDTH < CACHE_ELEMENTS  # fits in a single block
    whole = results()
    monkeypatch.setattr("ascend_run.ops.experts.expert_mlp.CACHE_ELEMENTS", 3 * WIDTH)
    for result, expected in zip(results(), whole, strict=True):
        assert torch.equal(result, expected)


def test_three_widths_are_kept_for_each_token() -> None:
    inputs, _ = leaves(COUNTS, gated=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(inputs[0], COUNTS, *inputs[1:])
    given = {x.data_ptr() for x in inputs}
    own = sum(x.numel() for x in kept if x.data_ptr() not in given)
    assert own == sum(COUNTS) * 3 * WIDTH
