"""One forward and backward of a run against those of a model of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.loaded_model import largest_difference

from .lora_jobs import Outcome, hf_names
from .peft_models import trained

TOLERANCE = 1e-5


@attrs.frozen
class OfPeft:
    """What a model of PEFT computes on a batch."""

    logits_BSV: Tensor
    plain_BSV: Tensor
    """Without its adapters."""
    loss: Tensor
    """Sum over all tokens."""
    gradients: Mapping[str, Tensor]
    """Of what it trains, by the names in its files."""


def of_peft(model: Any, batch: tuple[Tensor, Tensor]) -> OfPeft:
    """Take a forward and a backward.

    Args:
        batch: Tokens and labels, [B, S] int64.
    """
    tokens, labels = batch
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in in_files(trained(model)).items()}
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=tokens).logits
    return OfPeft(logits.detach(), plain, loss.detach(), gradients)


def in_files(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename PEFT's parameters as in its files."""
    return {
        name.removesuffix(".weight") if "magnitude" in name else name: tensor
        for name, tensor in tensors.items()
    }


def assert_is_of_peft(outcome: Outcome, wanted: OfPeft) -> None:
    """Compare logits, also with merged adapters, the loss, and every gradient; nothing else is
    trained, and the adapters count."""
    assert largest_difference(outcome.logits_BSV, wanted.logits_BSV) < TOLERANCE
    assert largest_difference(outcome.loss, wanted.loss) < TOLERANCE
    assert_gradients_are_of_peft(outcome, wanted)
    assert sorted(outcome.trained) == sorted(outcome.gradients), "nothing else is trained"
    assert largest_difference(wanted.plain_BSV, wanted.logits_BSV) > 0.01, "the adapters count"
    assert outcome.merged_logits_BSV is not None
    assert largest_difference(outcome.merged_logits_BSV, wanted.logits_BSV) < TOLERANCE


def assert_gradients_are_of_peft(outcome: Outcome, wanted: OfPeft) -> None:
    """Compare every gradient by its name."""
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in gradients.items():
        assert largest_difference(gradient, wanted.gradients[name]) < TOLERANCE, name
