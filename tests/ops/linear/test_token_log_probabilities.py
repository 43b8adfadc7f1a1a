"""Log-probabilities of labels against log_softmax of all logits, under any upstream gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.linear import vocabulary_shard
from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy
from ascend_run.ops.linear.token_log_probabilities import (
    token_log_probabilities,
    vocab_log_probabilities,
)
from ascend_run.testing.pool import GlooPool

from . import token_log_probabilities_jobs as jobs
from .token_log_probabilities_jobs import CAP, Tokens

LogProbabilities = Callable[..., Tensor]


def picked(logits_TV: Tensor, labels: Tensor) -> Tensor:
    return F.log_softmax(logits_TV, 1).gather(1, labels[:, None])[:, 0]


def formula(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    logits = F.linear(hidden, weight, bias_V)
    return picked(logits if softcap is None else softcap * torch.tanh(logits / softcap), labels)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, **_: None) -> Tensor:
    """The composition in the inputs' dtype, with a softmax in float32."""
    return picked(F.linear(hidden, weight).float(), labels)


def from_logits(hidden: Tensor, weight: Tensor, labels: Tensor, **_: None) -> Tensor:
    return vocab_log_probabilities(hidden @ weight.t(), labels)


def run(
    values_of: LogProbabilities,
    tokens: Tokens,
    leaves: Sequence[Tensor] | None = None,
    *,
    has_bias: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> list[Tensor]:
    """Return the values, and the gradients of hidden, weight and bias by a random upstream one."""
    hidden, weight, bias = leaves or tokens.leaves()
    inputs = [hidden, weight, bias][: 3 if has_bias else 2]
    values = values_of(
        hidden, weight, tokens.labels(), bias_V=bias if has_bias else None, **options
    )
    upstream = scale * tokens.upstream().to(values.dtype)
    return [values.detach(), *torch.autograd.grad(values, inputs, upstream)]


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max().clamp_min(1e-3)


@pytest.fixture(params=[2**20, 300], ids=["one-chunk", "many-chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 bytes hold 3 of the 11 tokens; their softmax is taken by blocks of 1."""
    monkeypatch.setattr(vocabulary_shard, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(vocabulary_shard, "ROW_BYTES", request.param // 2)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_equal_log_softmax(has_bias: bool, softcap: float | None) -> None:
    options = {"has_bias": has_bias, "softcap": softcap}
    assert_same(
        run(token_log_probabilities, Tokens(), **options), run(formula, Tokens(), **options)
    )


@pytest.mark.usefixtures("chunk_bytes")
def test_values_and_gradients_of_logits_equal_log_softmax() -> None:
    assert_same(run(from_logits, Tokens()), run(formula, Tokens()))


@settings(max_examples=40, deadline=None)
@given(*(st.integers(1, 30),) * 3, st.integers(1, 2000))
def test_any_size_equals_log_softmax(
    tokens: int, hidden: int, vocabulary: int, chunk_bytes: int
) -> None:
    problem = Tokens(tokens=tokens, hidden=hidden, vocabulary=vocabulary)
    want = run(formula, problem)
    assert_same(run(token_log_probabilities, problem, chunk_bytes=chunk_bytes), want)
    assert_same(run(from_logits, problem), want)


@pytest.mark.parametrize("softcap", [None, CAP])
def test_gradcheck_in_float64(softcap: float | None) -> None:
    tokens = Tokens(tokens=5, hidden=3, vocabulary=4)
    labels = tokens.labels()

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_log_probabilities(
            hidden, weight, labels, bias_V=bias, softcap=softcap, chunk_bytes=64
        )

    assert torch.autograd.gradcheck(values, tokens.leaves())


@pytest.mark.parametrize(
    ("chunk_bytes", "tokens"), [(1, [1] * 11), (300, [3, 3, 3, 2]), (2**20, [11])], ids=str
)
def test_backward_recomputes_the_chunks_of_forward(chunk_bytes: int, tokens: list[int]) -> None:
    """At least one token each; 12 logits of a token take 96 bytes."""
    seen: list[int] = []

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:  # only logits have one
            assert out.shape[1] == 12
            seen.append(len(out))
        return torch.mm(input, mat2, out=out)

    options = {"matmul": matmul, "chunk_bytes": chunk_bytes}
    assert_same(run(token_log_probabilities, Tokens(), **options), run(formula, Tokens()))
    assert seen == 2 * tokens


def test_every_matmul_is_that_of_the_provider() -> None:
    """One of logits each way, and those of two gradients."""
    calls = 0

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.mul(torch.mm(input, mat2), 2.0, out=out)

    _, dhidden, dweight = run(token_log_probabilities, Tokens(), matmul=matmul)
    hidden, weight, _ = Tokens().leaves()
    doubled = (hidden.detach().requires_grad_(), (2 * weight).detach().requires_grad_())
    _, *want = run(formula, Tokens(), (*doubled, weight))
    assert calls == 4
    # The doubled factor of the logits' gradient, times that of the matmul itself.
    assert_same([dhidden, dweight], [want[0], 2 * want[1]])


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("values_of", [token_log_probabilities, from_logits])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_precision_is_no_worse_than_log_softmax(
    dtype: torch.dtype, values_of: LogProbabilities
) -> None:
    """Of float32 logits; in float32 itself, a chunk's order of a sum may differ by a unit."""
    tokens = Tokens(tokens=64, hidden=48, vocabulary=200, dtype=dtype)
    leaves = tokens.leaves()
    truth = run(formula, tokens, [leaf.detach().double().requires_grad_() for leaf in leaves])
    ours, theirs = run(values_of, tokens, leaves), run(plain, tokens, leaves)
    assert [t.dtype for t in ours] == [torch.float32, dtype, dtype]
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        error, plain_error = ((t.double() - exact).square().mean().sqrt() for t in (a, b))
        slack = torch.finfo(torch.float32).eps * exact.abs().max()
        assert error <= 1.05 * plain_error + slack


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcapped_values_of_half_precision_are_close(dtype: torch.dtype) -> None:
    """Within 4 units of eps of the logits, which are in the inputs' dtype."""
    tokens = Tokens(tokens=64, hidden=32, vocabulary=48, dtype=dtype)
    leaves = tokens.leaves()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    options = {"has_bias": True, "softcap": CAP}
    got = run(token_log_probabilities, tokens, leaves, **options)
    for ours, want in zip(got, run(formula, tokens, exact, **options), strict=True):
        error = (ours.double() - want).abs().max() / want.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps


def test_a_sum_over_chunks_in_half_precision_is_rounded_once() -> None:
    """512 halves, one a chunk: in bf16 their sum stays at 128, where the next number is 129."""
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    values = token_log_probabilities(
        hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_bytes=4
    )
    (gradient,) = torch.autograd.grad(values.sum(), weight)
    assert gradient.tolist() == [[256.0], [-256.0]]


def test_half_precision_keeps_gradients_out_of_its_range() -> None:
    """A probability of 1e-9 times a loss scale, and a factor above fp16's largest number that a
    small weight brings back into its range."""
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float16, requires_grad=True)
    rows = [[0.0, 1.0], [-20.7, 1.0]]
    weight = torch.tensor(rows, dtype=torch.float16, requires_grad=True)
    (dweight,) = torch.autograd.grad(
        token_log_probabilities(hidden, weight, torch.tensor([0])), weight, torch.tensor([2.0**16])
    )
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    upstream = torch.tensor([2.0**16], dtype=torch.float64)
    (want,) = torch.autograd.grad(formula(*wide, torch.tensor([0])), wide[1], upstream)
    assert abs(want[1, 0]) > 6e-8  # smallest fp16 number
    torch.testing.assert_close(dweight[1, 0].double(), want[1, 0], rtol=0.05, atol=0)
    small = torch.tensor([[0.01], [-0.01]], dtype=torch.float16)
    one = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    values = token_log_probabilities(one, small, torch.tensor([0]))
    (dhidden,) = torch.autograd.grad(values, one, torch.tensor([2.0**18]))
    assert dhidden.item() == pytest.approx(2.0**18 * 0.01, rel=0.02)


def test_values_are_the_losses_of_linear_cross_entropy() -> None:
    """In every bit, whose sum masks all other tokens."""
    tokens = Tokens(dtype=torch.float32)
    hidden, weight, _ = tokens.leaves()
    values = token_log_probabilities(hidden, weight, tokens.labels())
    for token in range(tokens.tokens):
        mask = F.one_hot(torch.tensor(token), tokens.tokens)
        loss = linear_cross_entropy(hidden, weight, tokens.labels(), mask)
        assert loss == -values[token]


def test_logits_far_apart_give_a_finite_value_and_gradient() -> None:
    """The label's probability underflows in float32; its logarithm is a difference of logits."""
    logits = torch.tensor([[0.0, 300.0, -300.0]], requires_grad=True)
    value = vocab_log_probabilities(logits, torch.tensor([2]))
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.tolist() == [-600.0]
    assert gradient.tolist() == [[0.0, -1.0, 1.0]]


def test_only_gradients_asked_for_are_computed() -> None:
    tokens = Tokens()
    hidden, weight, bias = tokens.leaves()
    labels, upstream = tokens.labels(), tokens.upstream()
    _, *both = run(token_log_probabilities, tokens)
    for leaf, frozen, want in ((hidden, weight, both[0]), (weight, hidden, both[1])):
        with Products() as seen:
            first, second = (x.detach() if x is frozen else x for x in (hidden, weight))
            values = token_log_probabilities(first, second, labels)
            (got,) = torch.autograd.grad(values, leaf, upstream)
        assert torch.equal(got, want)
        assert len(seen.shapes) == 3  # logits twice, one gradient
    values = token_log_probabilities(hidden.detach(), weight.detach(), labels, bias_V=bias)
    with Products() as seen:
        torch.autograd.grad(values, bias, upstream)
    assert len(seen.shapes) == 1


class Products(TorchDispatchMode):
    """Records the shape of every product of matrices, and of the largest tensor's storage."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
            if "mm" in function.name():
                self.shapes.append(tuple(out.shape))
        return out


def test_no_more_than_a_chunk_of_logits_is_ever_allocated() -> None:
    tokens = Tokens(tokens=2048, hidden=8, vocabulary=4096, dtype=torch.bfloat16)
    with Products() as seen:
        run(token_log_probabilities, tokens, softcap=CAP, chunk_bytes=2**21)
    assert seen.largest <= 2**21 < 2048 * 4096 * 2
    assert {shape for shape in seen.shapes if shape[1] == 4096} == {(256, 4096)}


def test_without_gradients_only_the_logits_are_computed() -> None:
    hidden, weight, _ = Tokens().leaves()
    with Products() as seen, torch.no_grad():
        token_log_probabilities(hidden, weight, Tokens().labels())
    assert seen.shapes == [(11, 12)]


def test_a_second_backward_of_a_kept_graph_gives_the_same() -> None:
    tokens = Tokens()
    hidden, weight, _ = tokens.leaves()
    values = token_log_probabilities(hidden, weight, tokens.labels(), softcap=CAP)
    first, second = (
        torch.autograd.grad(values, [hidden, weight], tokens.upstream(), retain_graph=True)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_are_left_as_they_were() -> None:
    tokens = Tokens()
    leaves = tokens.leaves()
    logits = (leaves[0] @ leaves[1].t()).detach().requires_grad_()
    inputs = (*leaves, logits)
    before = [leaf.detach().clone() for leaf in inputs]
    run(token_log_probabilities, tokens, leaves, has_bias=True, softcap=CAP)
    values = vocab_log_probabilities(logits, tokens.labels())
    torch.autograd.grad(values, logits, tokens.upstream())
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_no_tokens_give_no_values_and_gradients_of_zero(has_bias: bool) -> None:
    tokens = Tokens(tokens=0)
    values, dhidden, *others = run(token_log_probabilities, tokens, has_bias=has_bias)
    assert values.shape == (0,)
    assert dhidden.shape == (0, 6)
    for gradient, leaf in zip(others, tokens.leaves()[1:], strict=False):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("chunk_bytes", [2**20, 200], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("split", [(6, 6), (8, 4), (12, 0)], ids=str)
def test_vocabulary_shards_equal_the_full_vocabulary(
    gloo_pool: GlooPool, split: tuple[int, ...], chunk_bytes: int, softcap: float | None
) -> None:
    """Equal parts; fewer valid rows on the last rank; none there."""
    tokens = Tokens()
    parts = gloo_pool.run(jobs.on_shards, 2, tokens, split, chunk_bytes, softcap)
    want = run(formula, tokens, has_bias=True, softcap=softcap)
    hidden, weight, _ = tokens.leaves()
    logits = (hidden @ weight.t()).detach().requires_grad_()
    values = picked(logits, tokens.labels())
    (dlogits,) = torch.autograd.grad(values, logits, tokens.upstream())
    for part in parts:
        assert_same([part.fused[0], part.from_logits[0]], [want[0], values.detach()])
    assert_same([parts[0].fused[1] + parts[1].fused[1]], [want[1]])
    for index in (2, 3):
        assert_same([torch.cat([part.fused[index] for part in parts])], [want[index]])
    assert_same([torch.cat([part.from_logits[1] for part in parts], dim=1)], [dlogits])


def test_no_tokens_on_vocabulary_shards(gloo_pool: GlooPool) -> None:
    for part in gloo_pool.run(jobs.on_shards, 2, Tokens(tokens=0), (8, 4), 200, None):
        assert part.fused[0].shape == (0,)
        assert not part.fused[2].any()
