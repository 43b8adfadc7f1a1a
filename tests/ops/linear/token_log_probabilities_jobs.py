"""Log-probabilities on vocabulary shards: every rank draws the same full tensors."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.linear.token_log_probabilities import (
    token_log_probabilities,
    vocab_log_probabilities,
)
from tests.ops.elementwise.elementwise import draw

CAP = 0.8


@attrs.frozen(kw_only=True)
class Tokens:
    """What log-probabilities are taken of, and a random upstream gradient."""

    tokens: int = 11
    hidden: int = 6
    vocabulary: int = 12
    dtype: torch.dtype = torch.float64

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden [T, H], weight [V, H], bias [V]."""
        return (
            draw(self.tokens, self.hidden, seed=1, dtype=self.dtype),
            draw(self.vocabulary, self.hidden, seed=2, dtype=self.dtype),
            draw(self.vocabulary, seed=3, dtype=self.dtype),
        )

    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        return torch.randint(self.vocabulary, (self.tokens,), generator=generator)

    def upstream(self) -> Tensor:
        """One number a token, some of them 0 and of either sign."""
        upstream = draw(self.tokens, seed=5).detach()
        upstream[::4] = 0.0
        return upstream


@attrs.frozen
class Shard:
    """One rank's results; the last tensor of each list is of its rows of the vocabulary.

    Attributes:
        fused: Values, this rank's part of the hidden gradient, gradients of the weight and bias.
        from_logits: Values, gradient of the logits.
    """

    fused: list[Tensor]
    from_logits: list[Tensor]


def on_shards(
    tokens: Tokens, split: tuple[int, ...], chunk_bytes: int, softcap: float | None
) -> Shard:
    hidden, weight, bias = (leaf.detach() for leaf in tokens.leaves())
    weight, bias = (leaf.split(split)[dist.get_rank()].clone() for leaf in (weight, bias))
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    labels, upstream = tokens.labels(), tokens.upstream()
    group = dist.group.WORLD
    fused = token_log_probabilities(
        hidden,
        weight,
        labels,
        tp_group=group,
        bias_V=bias,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
    )
    logits = (hidden @ weight.t()).detach().requires_grad_()
    from_logits = vocab_log_probabilities(logits, labels, group)
    return Shard(
        [fused.detach(), *torch.autograd.grad(fused, leaves, upstream)],
        [from_logits.detach(), *torch.autograd.grad(from_logits, [logits], upstream)],
    )
