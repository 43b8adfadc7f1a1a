"""Codes, moments and weights against the 8-bit AdamW of torchao, and values against bitsandbytes'.

Their scale of a block is its largest magnitude and their values end at 1 and -0.993; ours is the
value of the largest magnitude, with its sign. Both formats are one where that value is positive.
AdamW is an odd function of weight and gradient, so blocks that are negated cover the other sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import bitsandbytes.functional
import pytest
import torch
import torchao.optim.quant_utils
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from ascend_run.plugins.optimizers.low_precision_optimizer.quantization import (
    Quantizer,
    dynamic_values,
)

from .test_optimizer import BETAS, BLOCK, DECAY, RATE, built, draw

EPS: Final = 2.0**-23
"""Of float32: twice the largest rounding error."""
SHAPE: Final = (40, BLOCK)
"""One block in each row; torchao keeps fewer than 4096 elements in float32."""
STEPS: Final = 20
BOOKS: Final[dict[str, Callable[..., list[float] | Tensor]]] = {
    "torchao": torchao.optim.quant_utils.create_dynamic_map,
    "bitsandbytes": bitsandbytes.functional.create_dynamic_map,
}


@pytest.mark.parametrize("book", BOOKS)
@pytest.mark.parametrize("signed", [True, False])
def test_values_are_theirs(signed: bool, book: str) -> None:
    """Theirs are computed in float32, the ones here in float64: within 1.5 units of eps."""
    theirs = torch.as_tensor(BOOKS[book](signed=signed)).double()
    ours = torch.tensor(dynamic_values(signed=signed)).double()
    assert len(theirs) == len(ours) == 256
    assert ((ours - theirs).abs() <= 1.5 * EPS * theirs.abs()).all()


def assert_next_to_a_border(
    units: Tensor, ours: Tensor, theirs: Tensor, error: Tensor, *, signed: bool
) -> None:
    """Check elements with unequal codes: exact values on a border but for an error."""
    values = torch.tensor(dynamic_values(signed=signed), dtype=torch.float64)
    lower = torch.minimum(ours, theirs)
    assert (torch.maximum(ours, theirs) == lower + 1).all()
    border = (values[lower] + values[lower + 1]) / 2
    assert ((units - border).abs() <= error).all()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_theirs(signed: bool) -> None:
    """Of values of many magnitudes; both read each other's codes."""
    spread = torch.linspace(0, 4, 400).view(-1, 1)
    wide = draw((400, BLOCK), 0) * torch.exp(spread * draw((400, BLOCK), 1)) * 1e-4
    wide = wide if signed else wide.square()
    largest = wide.gather(-1, wide.abs().argmax(dim=-1, keepdim=True))
    theirs = OptimState8bit.zeros(wide.shape, signed=signed)
    theirs.copy_(wide * largest.sign())
    quantizer = Quantizer(signed=signed, device=wide.device)
    codes, scales = quantizer.quantized(wide.view(-1))
    assert torch.equal(scales.abs(), theirs.scale)
    apart = codes.view_as(wide) != theirs.codes
    found = (wide.double() / largest.double())[apart]
    pair = (codes.view_as(wide)[apart].long(), theirs.codes[apart].long())
    assert_next_to_a_border(found, *pair, 4 * EPS * found.abs(), signed=signed)
    assert float(apart.double().mean()) < 1e-4
    values = quantizer.dequantized(theirs.codes.view(-1), scales).view_as(wide)
    assert len(theirs.codes.unique()) > 250
    torch.testing.assert_close(values * largest.sign(), theirs.dequantize(), rtol=2 * EPS, atol=0)


def gradients(step: int) -> Tensor:
    """Gradients of many magnitudes, within a block and over blocks; the first of a block is the
    largest and positive, and so the largest of its moments."""
    found = draw(SHAPE, step) * torch.exp(1.5 * draw(SHAPE, 100 + step))
    found.clamp_(-8, 8)[:, 0] = 10 + draw(SHAPE[:1], 200 + step).abs()
    return found * torch.exp(3 * draw((SHAPE[0], 1), 300))


@torch.compiler.set_stance("force_eager")  # torchao compiles the same functions
def test_steps_are_theirs() -> None:
    """From one start: the codes of all steps, until one is next to a border; scales and weights."""
    sign = draw((SHAPE[0], 1), 1).sign()
    theirs = nn.Parameter(draw(SHAPE, 0))
    ours = nn.Parameter(theirs.detach() * sign)
    stepping = built(ours)
    reference = AdamW8bit([theirs], lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    apart = torch.zeros(SHAPE, dtype=torch.bool)
    before = [torch.zeros(SHAPE, dtype=torch.float64)] * 2
    for t in range(1, STEPS + 1):
        theirs.grad = gradients(t)
        ours.grad = theirs.grad * sign
        stepping.step()
        reference.step()
        grad = theirs.grad.double()
        for at, (name, beta, change) in enumerate(
            (("exp_avg", BETAS[0], grad), ("exp_avg_sq", BETAS[1], grad.square()))
        ):
            signs = sign if at == 0 else sign.abs()
            want = reference.state[theirs][name]
            codes = stepping.state[ours][f"{name}_codes"]
            scales = stepping.state[ours][f"{name}_scales"].view(-1, 1) * signs
            # A rounding in each step, of which the moment forgets a share.
            close = {"rtol": EPS / (1 - beta), "atol": 0.0}
            torch.testing.assert_close(scales.view(-1), want.scale, **close)
            new = (codes != want.codes) & ~apart
            exact = (beta * before[at] + (1 - beta) * change) / want.scale.double().view(-1, 1)
            size = (beta * before[at].abs() + (1 - beta) * change.abs()) / want.scale.view(-1, 1)
            assert_next_to_a_border(
                exact[new],
                codes[new].long(),
                want.codes[new].long(),
                (close["rtol"] + 4 * EPS) * size[new],
                signed=at == 0,
            )
            apart |= new
            before[at] = want.dequantize().double()
        error = (ours * sign - theirs).detach().abs()
        assert float(error[~apart].max()) <= t * EPS * float(theirs.detach().abs().max())
    assert int(apart.sum()) <= 2
    assert float((theirs.detach() - draw(SHAPE, 0)).abs().min()) > 0
