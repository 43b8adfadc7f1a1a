"""The losses of routers are means over the routed tokens, however many of them are trained. In
float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import MOE
from tests.support.router_losses import (
    COEFFICIENT,
    ROUTER,
    assert_gradient_of_mean,
    aux_loss,
    of_router_losses,
    z_loss,
)

LENGTH, ROWS, BATCH = 16, 2, 4
VALUES: dict[str, Any] = {
    **MOE,
    "model.num_layers": 1,
    "data.seq_length": LENGTH,
    "train.micro_batch_size": ROWS,
    "train.global_batch_size": BATCH,
}


def seq_aux_loss(logit_TX: Tensor) -> Tensor:
    rows = logit_TX.view(LENGTH, ROWS, -1).unbind(1)
    return torch.stack([aux_loss(row) for row in rows]).mean()


LOSSES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "aux_loss": ({"model.moe_aux_loss_coeff": COEFFICIENT}, aux_loss),
    "seq_aux_loss": (
        {
            "model.moe_aux_loss_coeff": COEFFICIENT,
            "model.moe_router_load_balancing_type": "seq_aux_loss",
        },
        seq_aux_loss,
    ),
    "z_loss": ({"model.moe_z_loss_coeff": COEFFICIENT}, z_loss),
}


def samples(masked: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the samples of a global batch, in which the first tokens of rows are not trained.

    Args:
        masked: Number of those of each row.
    """
    generator = torch.Generator().manual_seed(3)
    places, made = torch.arange(LENGTH), []
    for count in masked:
        text = torch.randint(90, (LENGTH + 1,), generator=generator)
        made.append(
            {
                "tokens": text[:-1],
                "labels": text[1:],
                "loss_mask": (places >= count).float(),
                "position_ids": places,
            }
        )
    return made


@pytest.mark.parametrize("loss", LOSSES)
def test_half_of_the_tokens_masked_leaves_the_gradient_of_the_mean(loss: str) -> None:
    losses, formula = LOSSES[loss]
    whole, _, _ = of_router_losses(VALUES, losses, lambda _: samples([0] * BATCH))
    half, weight, inputs = of_router_losses(VALUES, losses, lambda _: samples([12, 8, 4, 8]))
    assert len(inputs) == BATCH // ROWS
    assert_gradient_of_mean(half[ROUTER], formula, weight, inputs)
    for name, gradient in half.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-14, msg=name)
