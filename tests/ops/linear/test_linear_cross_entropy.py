"""Cross-entropy, fused with its projection or not, against its formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.linear import vocabulary_shard
from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy
from ascend_run.testing.pool import GlooPool

from . import linear_cross_entropy_jobs as jobs
from .linear_cross_entropy_jobs import Problem

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def formula(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    target = logits[torch.arange(len(labels)), labels]
    return ((torch.logsumexp(logits, 1) - target) * mask).sum()


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum()


def from_logits(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return vocab_cross_entropy(hidden @ weight.t(), labels, mask)


def run(loss_of: Loss, tensors: tuple[Tensor, ...], scale: float = 0.3) -> list[Tensor]:
    """Return the loss, and both gradients of ``scale`` times it."""
    hidden, weight, labels, mask = tensors
    loss = loss_of(hidden, weight, labels, mask)
    return [loss.detach(), *torch.autograd.grad(scale * loss, [hidden, weight])]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max().clamp_min(1e-3)


@pytest.fixture(params=[2**20, 300], ids=["one-chunk", "many-chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_shard, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(vocabulary_shard, "ROW_BYTES", request.param // 2)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("loss_of", [linear_cross_entropy, from_logits])
def test_loss_and_gradients_follow_the_formula(loss_of: Loss) -> None:
    tensors = Problem().tensors()
    assert_same(run(loss_of, tensors), run(formula, tensors))


CAP = 0.8


def capped_formula(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = CAP * torch.tanh(hidden @ weight.t() / CAP)
    target = logits[torch.arange(len(labels)), labels]
    return ((torch.logsumexp(logits, 1) - target) * mask).sum()


def capped(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, mask, softcap=CAP)


@pytest.mark.usefixtures("chunk_bytes")
def test_softcapped_logits_follow_the_formula() -> None:
    tensors = Problem().tensors()
    assert_same(run(capped, tensors), run(capped_formula, tensors))


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("softcap", [None, CAP])
def test_a_bias_of_logits_follows_the_formula(softcap: float | None) -> None:
    """As a further column of the weight and a further hidden value of 1."""
    hidden, weight, labels, mask = Problem().tensors()
    wanted = capped_formula if softcap else formula
    bias = torch.randn(len(weight), dtype=torch.float64).requires_grad_()
    fused = linear_cross_entropy(hidden, weight, labels, mask, softcap=softcap, bias_V=bias)
    ones = torch.ones(len(hidden), 1, dtype=torch.float64)
    joined = torch.cat((weight, bias[:, None]), dim=1)
    plain = wanted(torch.cat((hidden, ones), dim=1), joined, labels, mask)
    results = [
        [loss.detach(), *torch.autograd.grad(0.3 * loss, [hidden, weight, bias])]
        for loss in (fused, plain)
    ]
    assert_same(*results)


@pytest.mark.parametrize(
    ("chunk_bytes", "tokens"), [(1, [1] * 11), (300, [3, 3, 3, 2]), (2**20, [11])], ids=str
)
def test_chunks_have_as_many_tokens_as_their_bytes_allow(
    chunk_bytes: int, tokens: list[int]
) -> None:
    """At least one; 12 logits of a token take 96 bytes."""
    seen: list[int] = []

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:  # only logits have one
            seen.append(len(out))
        return torch.mm(input, mat2, out=out)

    def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, mask, matmul=matmul, chunk_bytes=chunk_bytes
        )

    tensors = Problem().tensors()
    assert_same(run(in_chunks, tensors), run(formula, tensors))
    assert seen == tokens


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcapped_logits_of_half_precision_are_close(dtype: torch.dtype) -> None:
    """Gradients within 8 units of eps of the logits, which are in the inputs' dtype."""
    tensors = Problem(tokens=64, hidden=32, vocabulary=48, dtype=dtype).tensors()
    hidden, weight, labels, mask = tensors
    wide = (*(x.detach().double().requires_grad_() for x in (hidden, weight)), labels, mask)
    for got, want in zip(run(capped, tensors), run(capped_formula, wide), strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= 8 * torch.finfo(dtype).eps


@settings(max_examples=40, deadline=None)
@given(*(st.integers(1, 30),) * 3)
def test_any_size_follows_the_formula(tokens: int, hidden: int, vocabulary: int) -> None:
    tensors = Problem(tokens=tokens, hidden=hidden, vocabulary=vocabulary).tensors()
    assert_same(run(linear_cross_entropy, tensors), run(formula, tensors))
    assert_same(run(from_logits, tensors), run(formula, tensors))


def test_logits_far_apart_lose_neither_the_loss_nor_become_infinite() -> None:
    """The label's probability underflows in float32; its loss is the difference of the logits."""
    logits = torch.tensor([[0.0, 300.0, -300.0]], requires_grad=True)
    loss = vocab_cross_entropy(logits, torch.tensor([2]), torch.ones(1))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 600.0
    assert gradient.tolist() == [[0.0, 1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_precision_is_no_worse_than_the_plain_composition(dtype: torch.dtype) -> None:
    problem = Problem(tokens=128, hidden=64, vocabulary=500, dtype=dtype)
    tensors = problem.tensors()
    ones = torch.ones(128)
    tensors = (*tensors[:3], ones)
    exact = (
        *(t.detach().double().requires_grad_() for t in tensors[:2]),
        tensors[2],
        ones.double(),
    )
    truth = run(formula, exact)
    ours, theirs = run(linear_cross_entropy, tensors), run(plain, tensors)
    assert [t.dtype for t in ours] == [torch.float32, dtype, dtype]
    for a, b, c in zip(ours, theirs, truth, strict=True):
        error, plain_error = ((t.double() - c).square().mean().sqrt() for t in (a, b))
        # Allows two more ULPs of a sum of 128 losses in float32.
        assert error <= 1.05 * plain_error + (1e-4 if a.dim() == 0 else 0.0)


def test_only_what_is_asked_for_is_computed() -> None:
    hidden, weight, labels, mask = Problem().tensors()
    _, dhidden, dweight = run(linear_cross_entropy, (hidden, weight, labels, mask))
    frozen = linear_cross_entropy(hidden, weight.detach(), labels, mask)
    assert torch.equal(torch.autograd.grad(0.3 * frozen, hidden)[0], dhidden)
    frozen = linear_cross_entropy(hidden.detach(), weight, labels, mask)
    assert torch.equal(torch.autograd.grad(0.3 * frozen, weight)[0], dweight)


def test_a_second_backward_of_a_kept_graph_gives_the_same() -> None:
    hidden, weight, labels, mask = Problem().tensors()
    loss = linear_cross_entropy(hidden, weight, labels, mask)
    first = torch.autograd.grad(3 * loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(3 * loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_backward_makes_no_copy_of_a_gradient(dtype: torch.dtype) -> None:
    """The same bits as those of a product beside them."""
    hidden, weight, labels, mask = Problem(dtype=dtype).tensors()
    kept = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, mask), [hidden, weight])
    loss = linear_cross_entropy(hidden, weight, labels, mask)
    scale = torch.tensor(0.3, dtype=loss.dtype)
    with Made() as seen:
        scaled = torch.autograd.grad(loss, [hidden, weight], scale)
    assert all(torch.equal(a, b * scale) for a, b in zip(scaled, kept, strict=True))
    assert seen.largest <= 8


class Made(TorchDispatchMode):
    """Records the bytes of the largest storage that an operation made."""

    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and all(out is not argument for argument in args):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


class Softmaxes(TorchDispatchMode):
    """Records the shape of every softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._opname in ("softmax", "_softmax"):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "shapes"), [("cpu", [(16, 2**15)] * 4), ("meta", [(64, 2**15)])], ids=str
)
def test_a_device_is_not_kept_waiting_for_small_softmaxes(
    device: str, shapes: list[tuple[int, ...]]
) -> None:
    hidden, weight = (torch.ones(size, 8, device=device) for size in (64, 2**15))
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    with Softmaxes() as seen:
        linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, labels.bool())
    assert seen.shapes == shapes


def test_inputs_are_left_as_they_were() -> None:
    hidden, weight, labels, mask = Problem().tensors()
    logits = (hidden @ weight.t()).detach().requires_grad_()
    before = [t.detach().clone() for t in (hidden, weight, logits)]
    run(linear_cross_entropy, (hidden, weight, labels, mask))
    torch.autograd.grad(vocab_cross_entropy(logits, labels, mask), logits)
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, logits), before, strict=True))


def test_no_more_than_a_chunk_of_logits_is_ever_allocated() -> None:
    problem = Problem(tokens=8192, hidden=8, vocabulary=8192, dtype=torch.bfloat16)
    tensors = problem.tensors()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        run(linear_cross_entropy, tensors)
    assert largest <= vocabulary_shard.CHUNK_BYTES < 8192 * 8192 * 2


@pytest.mark.parametrize("chunk_bytes", [2**20, 200], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("split", [(6, 6), (8, 4), (12, 0)], ids=str)
def test_vocabulary_shards_agree_with_the_full_vocabulary(
    gloo_pool: GlooPool, split: tuple[int, ...], chunk_bytes: int
) -> None:
    """Equal parts; fewer valid rows on the last rank; none there."""
    problem = Problem(split=split, chunk_bytes=chunk_bytes)
    parts = gloo_pool.run(jobs.vocabulary_parallel, 2, problem)
    hidden, weight, labels, mask = problem.tensors()
    loss, dhidden, dweight = run(formula, (hidden, weight, labels, mask), scale=2.0)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    plain_loss = (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    (dlogits,) = torch.autograd.grad(2 * plain_loss, logits)
    want_capped = run(capped_formula, (hidden, weight, labels, mask), scale=2.0)
    assert_same([sum(part.capped[1] for part in parts)], [want_capped[1]])
    assert_same([torch.cat([part.capped[2] for part in parts])], [want_capped[2]])
    for part in parts:
        assert_same([part.fused, part.from_logits], [loss, loss])
        assert_same([part.capped[0]], [want_capped[0]])
    assert_same([sum(part.dhidden for part in parts)], [dhidden])
    assert_same([torch.cat([part.dweight for part in parts])], [dweight])
    assert_same([torch.cat([part.dlogits for part in parts], dim=1)], [dlogits])


@pytest.mark.parametrize("loss_of", [linear_cross_entropy, from_logits])
def test_half_precision_keeps_gradients_scaled_out_of_its_range(
    loss_of: Loss,
) -> None:
    """A token of probability 1e-9, whose gradient fp16 represents only after scaling."""
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float16, requires_grad=True)
    rows = [[0.0, 1.0], [-20.7, 1.0]]
    weight = torch.tensor(rows, dtype=torch.float16, requires_grad=True)
    labels, mask = torch.tensor([0]), torch.ones(1)
    scale = 2.0**16
    _, _, dweight = run(loss_of, (hidden, weight, labels, mask), scale)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    _, _, want = run(formula, (*exact, labels, mask.double()), scale)
    assert want[1, 0] > 6e-8  # smallest fp16 number
    torch.testing.assert_close(dweight[1, 0].double(), want[1, 0], rtol=0.05, atol=0)


def test_without_gradients_only_the_logits_are_computed() -> None:
    tensors = Problem().tensors()
    products: list[tuple[int, ...]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if "mm" in function.name():
                products.append(tuple(out.shape))
            return out

    with Watch(), torch.no_grad():
        linear_cross_entropy(*tensors)
    assert products == [(tensors[0].shape[0], tensors[1].shape[0])]
