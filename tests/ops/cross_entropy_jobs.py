"""What each rank computes in the tests of the vocabulary-parallel cross-entropy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy


def case(tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Hidden state, weight, labels and mask; the same on every rank."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    hidden = torch.randn(tokens, 12, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, 12, generator=generator, dtype=dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator, dtype=dtype).round(decimals=1)
    return hidden, weight, labels, mask


def by_formula(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The loss as it is defined, token by token."""
    losses = []
    for h, label, m in zip(hidden, labels, mask, strict=True):
        scores = weight @ h
        losses.append(m * (torch.log(torch.exp(scores).sum()) - scores[label]))
    return torch.stack(losses).sum()


def vocabulary_parallel(bounds: list[int], from_logits: bool) -> tuple[float, float, float]:
    """Errors of loss, hidden gradient (summed over ranks) and own weight rows' gradient."""
    rank = dist.get_rank()
    hidden, weight, labels, mask = case(tokens=9, vocab=bounds[-1])
    whole = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected = by_formula(*whole, labels, mask)
    (expected * 1.5).backward()
    rows = slice(bounds[rank], bounds[rank + 1])
    own_hidden = hidden.clone().requires_grad_()
    own_weight = weight[rows].clone().requires_grad_()
    if from_logits:
        loss = vocab_cross_entropy(own_hidden @ own_weight.t(), labels, mask, dist.group.WORLD)
    else:
        loss = linear_cross_entropy(own_hidden, own_weight, labels, mask, dist.group.WORLD)
    (loss * 1.5).backward()
    assert own_hidden.grad is not None
    dist.all_reduce(own_hidden.grad)
    return (
        float((loss - expected).detach().abs()),
        float((own_hidden.grad - whole[0].grad).abs().max()),
        _largest(own_weight.grad, whole[1].grad[rows]),
    )


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
