"""Compute the loss of a projection to a vocabulary, or the log-probability of each label, forward
and backward, ours and torch's alternately; one JSON line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy
from ascend_run.ops.linear.token_log_probabilities import token_log_probabilities

from . import llama
from .expert_mlps_worker import Step, difference, seconds_of
from .live_storages import LiveStorages

# T tokens, H hidden size, V vocabulary


def leaves(tokens: int, hidden: int, words: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden state [T, H], weight [V, H] and labels [T]."""
    generator = torch.Generator().manual_seed(5)
    hidden_TH = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VH = (0.02 * torch.randn(words, hidden, generator=generator)).to(dtype).requires_grad_()
    return hidden_TH, weight_VH, torch.randint(words, (tokens,), generator=generator)


def steps(inputs: Sequence[Tensor]) -> tuple[Step, Step]:
    """Ours, and torch's of all logits: functions that return the mean loss and both gradients."""
    hidden_TH, weight_VH, labels_T = inputs
    mask_T = torch.ones(len(labels_T))

    def ours() -> Tensor:
        return linear_cross_entropy(hidden_TH, weight_VH, labels_T, mask_T) / len(labels_T)

    def all_logits() -> Tensor:
        return F.cross_entropy(F.linear(hidden_TH, weight_VH), labels_T)

    def with_gradients(loss_of: Any) -> Step:
        def step() -> tuple[Tensor, ...]:
            loss = loss_of()
            return loss.detach(), *torch.autograd.grad(loss, (hidden_TH, weight_VH))

        return step

    return with_gradients(ours), with_gradients(all_logits)


def token_steps(inputs: Sequence[Tensor]) -> tuple[Step, Step]:
    """The same for log-probabilities: functions that return them and both gradients, for one random
    upstream gradient of each token."""
    hidden_TH, weight_VH, labels_T = inputs
    upstream_T = torch.randn(len(labels_T), generator=torch.Generator().manual_seed(6))

    def ours() -> Tensor:
        return token_log_probabilities(hidden_TH, weight_VH, labels_T)

    def all_logits() -> Tensor:
        logits_TV = F.linear(hidden_TH, weight_VH)
        return F.log_softmax(logits_TV, dim=1).gather(1, labels_T[:, None])[:, 0]

    def with_gradients(values_of: Any) -> Step:
        def step() -> tuple[Tensor, ...]:
            values = values_of()
            upstream = upstream_T.to(values.dtype)
            return values.detach(), *torch.autograd.grad(values, (hidden_TH, weight_VH), upstream)

        return step

    return with_gradients(ours), with_gradients(all_logits)


def peak_bytes(step: Step, inputs: Sequence[Tensor]) -> int:
    """Return the most bytes of storages in a step, without its inputs."""
    with LiveStorages(inputs) as seen:
        before = seen.live
        step()
    return seen.peak - before


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--words", type=int, default=65536)
    parser.add_argument("--dtype", choices=llama.DTYPES, default="bf16")
    parser.add_argument("--by-token", action="store_true", help="log-probabilities, not the loss")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    dtype = llama.DTYPES[options.dtype]
    inputs = leaves(options.tokens, options.hidden, options.words, dtype)
    ours, peer = (token_steps if options.by_token else steps)(inputs)
    results = ours()
    result: dict[str, Any] = {
        "difference": difference(results, peer()),
        "gradient_bytes": sum(gradient.nbytes for gradient in results[1:]),
        "ours_bytes": peak_bytes(ours, inputs),
        "peer_bytes": peak_bytes(peer, inputs),
        "ours": [],
        "peer": [],
    }
    for _ in range(options.pairs):
        for name, step in (("ours", ours), ("peer", peer)):
            result[name].append(seconds_of(step, options.steps))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
