"""Inputs and comparisons shared by the tests of elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Operator = Callable[..., Tensor]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def outputs_and_gradients(operator: Operator, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, then the gradient of each leaf for a fixed upstream gradient."""
    out = operator(*leaves)
    upstream = draw(*out.shape, seed=99, dtype=out.dtype).detach()
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_equal_to_formula(
    operator: Operator, formula: Operator, leaves: Sequence[Tensor]
) -> None:
    """Compare output and every gradient in float64, to 1e-12 of the largest value."""
    got = outputs_and_gradients(operator, leaves)
    want = outputs_and_gradients(formula, leaves)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype == torch.float64
        assert ours.shape == theirs.shape
        if theirs.numel():
            assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max().clamp_min(1e-3)


def assert_no_worse_than_plain(
    operator: Operator, plain: Operator, formula: Operator, leaves: Sequence[Tensor]
) -> None:
    """Check that the RMS error in the leaves' low precision is at most the plain composition's.

    Allows 5%, because both errors are sums of random rounding errors.
    """
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = outputs_and_gradients(formula, exact_leaves)
    ours = outputs_and_gradients(operator, leaves)
    theirs = outputs_and_gradients(plain, leaves)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        error, plain_error = ((t.double() - truth).square().mean().sqrt() for t in (a, b))
        assert error <= 1.05 * plain_error


def assert_subsets_of_gradients(operator: Operator, leaves: Sequence[Tensor]) -> None:
    """Check that each leaf alone gets the same gradient as together with the others."""
    _, *together = outputs_and_gradients(operator, leaves)
    for index, expected in enumerate(together):
        alone = [
            leaf if i == index else leaf.detach().clone().requires_grad_(False)
            for i, leaf in enumerate(leaves)
        ]
        out = operator(*alone)
        upstream = draw(*out.shape, seed=99, dtype=out.dtype).detach()
        (gradient,) = torch.autograd.grad(out, [leaves[index]], upstream)
        assert torch.equal(gradient, expected)


def assert_takes_expanded_gradients(operator: Operator, leaves: Sequence[Tensor]) -> None:
    """Check the gradient of a plain sum, which autograd expands from one number."""
    out = operator(*leaves)
    expanded = torch.autograd.grad(out.sum(), leaves)
    written = torch.autograd.grad(operator(*leaves), leaves, torch.ones_like(out))
    for ours, theirs in zip(expanded, written, strict=True):
        assert torch.equal(ours, theirs)
