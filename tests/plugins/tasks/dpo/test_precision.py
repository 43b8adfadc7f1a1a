"""The loss of pairs in half precision, and of long answers, against the formula in float64. Each
bound follows from the unit roundoff; none is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.linear.token_log_probabilities import token_log_probabilities
from ascend_run.plugin_api import Batch, LossSum
from ascend_run.plugins.tasks.dpo import DpoConfig
from ascend_run.plugins.tasks.dpo.task import DpoTask

# T tokens, D documents, H hidden size, V vocabulary

BETA = 0.1
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""The unit roundoff: half of the distance from 1 to the next number."""
CONTEXT: Any = SimpleNamespace(groups=SimpleNamespace(cp=SimpleNamespace(rank=int, size=lambda: 1)))


class Head(nn.Module):
    """A model whose hidden states are given: what is left of it is the loss of each token."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor) -> None:
        super().__init__()
        self.hidden_TH, self.weight_VH = hidden_TH, nn.Parameter(weight_VH)

    def forward(self, *, labels: Tensor, loss_mask: Tensor, **ignored: Any) -> Tensor:
        each_T = token_log_probabilities(self.hidden_TH, self.weight_VH, labels.flatten())
        return (-each_T * loss_mask.flatten()).view(labels.shape)

    def exact(self, labels_T: Tensor) -> Tensor:
        """Return the log-probability of each label in float64, of the same inputs."""
        logits_TV = self.hidden_TH.double() @ self.weight_VH.detach().double().T
        return torch.log_softmax(logits_TV, -1).gather(1, labels_T[:, None]).flatten()


@attrs.frozen
class Compared:
    """The loss of one pair, and what the formula gives for it in float64."""

    loss: float
    wanted: float
    margin: float
    """Beta times the margin, as it is logged."""
    wanted_margin: float
    gradient_VH: Tensor
    """Of the policy's weight, in its dtype."""
    ratios_T: Tensor
    """Of trained tokens, float64."""


def compare(policy: Head, reference: Head, labels_T: Tensor, documents_T: Tensor) -> Compared:
    """Return the loss of one pair, all of whose tokens are trained."""
    task, row = DpoTask(DpoConfig(beta=BETA)), {"labels": labels_T, "documents": documents_T}
    tensors = {name: value_T[None] for name, value_T in row.items()}
    for name in ("tokens", "position_ids"):
        tensors[name] = tensors["labels"]
    tensors["loss_mask"] = torch.ones_like(tensors["labels"], dtype=torch.float32)
    ends = (*(documents_T.diff().nonzero().flatten() + 1).tolist(), len(documents_T))
    batch = Batch(tensors=tensors, fields={}, document_ends=ends)
    with torch.no_grad():
        value = task.reference_step(CONTEXT, reference, batch)
    batch = attrs.evolve(batch, tensors={**tensors, "reference": value})
    found = task.forward_step(CONTEXT, policy, batch)
    assert isinstance(found, LossSum)
    assert found.sum.dtype is torch.float32
    found.sum.backward()
    assert policy.weight_VH.grad is not None
    assert policy.weight_VH.grad.isfinite().all()
    ratios_T = policy.exact(labels_T) - reference.exact(labels_T)
    sign_T = 1.0 - 2.0 * documents_T.double()
    margin = BETA * (sign_T * ratios_T).sum()
    wanted = -torch.nn.functional.logsigmoid(margin)
    return Compared(
        loss=float(found.sum.detach()),
        wanted=float(wanted),
        margin=float(found.metrics["rewards/margins"][0]),
        wanted_margin=float(margin),
        gradient_VH=policy.weight_VH.grad,
        ratios_T=ratios_T,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_within_the_rounding_of_logits(dtype: torch.dtype, seed: int) -> None:
    """A logit is a sum of H products in float32, rounded once to the dtype. An error of at most d
    in each logit is one of at most 2 d in a log-probability (of the label's logit, and of the
    log-sum-exp, whose gradient sums to 1); ratios have two of them, the margin sums all tokens, and
    the loss changes by at most beta times the margin's change."""
    torch.manual_seed(seed)
    tokens, width, vocabulary = 24, 32, 40
    labels_T = torch.randint(vocabulary, (tokens,))
    documents_T = torch.arange(tokens) // (tokens // 2)
    heads = [
        Head(torch.randn(tokens, width).to(dtype), torch.randn(vocabulary, width).to(dtype))
        for _ in range(2)
    ]
    errors_T = torch.zeros(tokens, dtype=torch.float64)
    for head in heads:
        hidden_TH, weight_VH = head.hidden_TH.double(), head.weight_VH.detach().double()
        logits_TV, sizes_TV = hidden_TH @ weight_VH.T, hidden_TH.abs() @ weight_VH.abs().T
        of_sum_TV = width * UNIT[torch.float32] * sizes_TV
        of_logit_TV = of_sum_TV + UNIT[dtype] * (logits_TV.abs() + of_sum_TV)
        # Softmax and its logarithm are in float32: V + 4 units of eps of a logit.
        wide_T = (vocabulary + 4) * UNIT[torch.float32] * logits_TV.abs().amax(-1)
        errors_T += 2 * of_logit_TV.amax(-1) + wide_T
    found = compare(*heads, labels_T, documents_T)
    sums = tokens * UNIT[torch.float32] * float((found.ratios_T.abs() + errors_T).sum())
    bound = BETA * (float(errors_T.sum()) + sums) + 4 * UNIT[torch.float32] * (1 + found.wanted)
    assert abs(found.loss - found.wanted) <= bound
    assert bound < 0.2 * (1 + found.wanted) * (UNIT[dtype] / UNIT[torch.float16])


def test_long_answers_have_a_finite_and_exact_loss() -> None:
    """800 tokens each, whose probabilities together are far below the least float64. Ratios are
    summed token by token, so the error is that of their sizes, not of the log-probabilities'.

    Hidden states are unit vectors, so logits are the weights themselves and nothing is rounded in
    them."""
    torch.manual_seed(0)
    answer, width = 800, 16
    documents_T = torch.arange(2 * answer) // answer
    labels_T = torch.randint(width, (2 * answer,))
    hidden_TH = torch.eye(width)[torch.randint(width, (2 * answer,))]
    weight_VH = 6.0 * torch.randn(width, width)
    # Differences of a hundredth, as after some steps; multiples of 2^-20, so sums are exact.
    noise_VH = (0.01 * torch.randn(width, width) * 2**20).round() / 2**20
    weight_VH = (weight_VH * 2**12).round() / 2**12
    policy, reference = Head(hidden_TH, weight_VH + noise_VH), Head(hidden_TH, weight_VH)
    of_answer = policy.exact(labels_T)[:answer].sum()
    assert of_answer < -4000
    assert torch.exp(of_answer) == 0.0
    found = compare(policy, reference, labels_T, documents_T)
    unit = UNIT[torch.float32]
    logits_TV = hidden_TH.double() @ policy.weight_VH.detach().double().T
    # The sum of V exponentials and its logarithm, the shift by the largest, and the difference.
    of_token_T = (4 * logits_TV.abs().amax(-1) + width + 4) * unit
    sums = 2 * answer * unit * float(found.ratios_T.abs().sum())
    bound = BETA * (2 * float(of_token_T.sum()) + sums) + 4 * unit * (1 + found.wanted)
    assert abs(found.loss - found.wanted) <= bound
    assert bound < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_only_logits_and_their_gradients_are_in_the_dtype(dtype: torch.dtype) -> None:
    """Hidden states are unit vectors, so that no logit is rounded, and what follows is as exact in
    half precision as in float32: a log-probability, a ratio, the sum over an answer or the
    reference's value that was rounded to half precision would show.

    The gradient of a logit is rounded once, in the dtype, and so is that of a weight, of a sum in
    float32. What it is multiplied by has the relative error of a sigmoid: at most that of its
    argument, times the sigmoid of the negative argument."""
    torch.manual_seed(0)
    tokens, width, unit = 96, 16, UNIT[torch.float32]
    labels_T = torch.randint(width, (tokens,))
    documents_T = torch.arange(tokens) // (tokens // 2)
    hidden_TH = torch.eye(width, dtype=dtype)[torch.randint(width, (tokens,))]
    reference, policy = (
        Head(hidden_TH, (6.0 * torch.randn(width, width)).to(dtype)) for _ in range(2)
    )
    found = compare(policy, reference, labels_T, documents_T)
    heads = [head.weight_VH.detach().double() for head in (policy, reference)]
    logits_TV, others_TV = (hidden_TH.double() @ weight_VH.T for weight_VH in heads)
    # The sum of V exponentials and its logarithm, the shift by the largest, and the difference.
    sizes_T = logits_TV.abs().amax(-1) + others_TV.abs().amax(-1)
    of_tokens = float((4 * sizes_T + 2 * (width + 4)).sum()) * unit
    sums = (tokens + 4) * unit * float(found.ratios_T.abs().sum())
    bound = BETA * (of_tokens + sums)
    assert abs(found.margin - found.wanted_margin) <= bound
    assert abs(found.loss - found.wanted) <= bound + 4 * unit * (1 + found.wanted)
    assert bound < 2e-3
    assert float(found.ratios_T.abs().mean()) > 5.0, "so large that their rounding errors count"
    assert found.wanted_margin < -1.0, "neither the loss nor its gradient is near 0"

    sign_T = 1.0 - 2.0 * documents_T.double()
    slope, other = (
        float(torch.sigmoid(torch.tensor(margin, dtype=torch.float64)))
        for margin in (-found.wanted_margin, found.wanted_margin + bound)
    )
    one_hot_TV = torch.nn.functional.one_hot(labels_T, width).double()
    upstream_T1 = -BETA * slope * sign_T[:, None]
    softmax_TV = logits_TV.softmax(-1)
    wanted_VH = (upstream_T1 * (one_hot_TV - softmax_TV)).T @ hidden_TH.double()
    sizes_VH = (BETA * slope * (one_hot_TV + softmax_TV)).T @ hidden_TH.double()
    of_softmax = (4 * float(logits_TV.abs().max()) + width + 8 + tokens) * unit
    relative = 2 * UNIT[dtype] + UNIT[dtype] ** 2 + of_softmax + bound * other
    # What fp16 rounds to its least numbers.
    least = torch.finfo(dtype).smallest_normal * UNIT[dtype] * (tokens + 1)
    assert ((found.gradient_VH.double() - wanted_VH).abs() <= relative * sizes_VH + least).all()
