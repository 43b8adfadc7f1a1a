"""Steps with moments in 8 bits, and their form in a checkpoint."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.optimizer_states import create_states, state_problems
from ascend_run.plugin_api import OptimizerSpec, RunConfig
from ascend_run.plugins.optimizers.low_precision_optimizer import (
    LowPrecisionOptimizer,
    LowPrecisionOptimizerConfig,
    optimizer,
)
from ascend_run.types.config import OptimizerSection
from tests.support.tiny_configs import model_fields, parallel_fields

RATE, DECAY = 0.03, 0.3
BETAS: Final = (0.9, 0.95)
BLOCK: Final = 256
SHAPE: Final = (40, 50)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec(*float32: str) -> OptimizerSpec:
    config = RunConfig(
        model=model_fields(),
        parallel=parallel_fields(),
        optimizer=OptimizerSection(lr=RATE, adam_beta2=BETAS[1], weight_decay=DECAY),
    )
    plugin = LowPrecisionOptimizer(LowPrecisionOptimizerConfig(float32=float32))
    found: OptimizerSpec = plugin.ascend_optimizer(config=config)
    return found


def built(*parameters: Tensor, name: str = "mlp.linear_fc1.weight") -> Any:
    found = spec()
    options = found.parameter_options(name, True)
    return found.build([{"params": [*parameters], **options}])


def values_of(*, signed: bool) -> list[float]:
    """The values of the paper's tree: evenly spaced in each decade, twice as many in the next."""
    found = {0.0, 1.0}
    for zeros in range(7):
        steps = 2 ** (6 - zeros + (not signed))
        for at in range(steps):
            value = 10.0**-zeros * (0.1 + 0.9 * (at + 0.5) / steps)
            found |= {value, -value} if signed else {value}
    return sorted(found)


def rounded(wide: Tensor, *, signed: bool) -> Tensor:
    """Round each block of 256 to the nearest values times its scale, in float64."""
    values = torch.tensor(values_of(signed=signed)).double()
    blocks = [*wide.double().view(-1).split(BLOCK)]
    for at, block in enumerate(blocks):
        scale = block[block.abs().argmax()]
        nearest = (block[:, None] / scale - values).abs().argmin(dim=-1)
        blocks[at] = values[nearest] * scale
    return torch.cat(blocks).view_as(wide)


def test_each_step_is_adamw_of_the_rounded_moments() -> None:
    """Against float64, from the moments before the step. Values next to a border may round to
    either side."""
    p = nn.Parameter(draw(SHAPE, 0))
    stepping = built(p)
    first, second = torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double()
    for t in range(1, 7):
        before = p.detach().double()
        p.grad = draw(SHAPE, t) * (1 + 100 * (draw(SHAPE, 50 + t) > 2))
        stepping.step()
        g = p.grad.double()
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g * g
        size = (second / (1 - BETAS[1] ** t)).sqrt() + 1e-8
        want = before - RATE * (first / (1 - BETAS[0] ** t) / size + DECAY * before)
        torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-6)
        stepping.expand_states()
        state = stepping.state[p]
        for name, exact, signed in (("exp_avg", first, True), ("exp_avg_sq", second, False)):
            want, got = rounded(exact, signed=signed), state[name].double()
            apart = (got - want).abs() > 1e-5 * want.abs()
            assert float(apart.double().mean()) < 1e-3
            exact.copy_(got)


def test_states_in_between_are_codes_and_scales() -> None:
    """2 bytes for an element and 8 for a block, where AdamW has 8 for an element."""
    p = nn.Parameter(draw((40, 50), 0))
    stepping = built(p)
    p.grad = draw((40, 50), 1)
    stepping.step()
    state = stepping.state[p]
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "step": ((), torch.float32),
        "exp_avg_codes": ((40, 50), torch.uint8),
        "exp_avg_sq_codes": ((40, 50), torch.uint8),
        "exp_avg_scales": ((8,), torch.float32),
        "exp_avg_sq_scales": ((8,), torch.float32),
    }
    held = sum(t.numel() * t.element_size() for t in state.values())
    assert held == 2 * 2000 + 8 * 8 + 4


def test_expanding_between_steps_changes_no_bit() -> None:
    """As when a checkpoint is saved, and a run resumed from it."""
    plain, interrupted = (nn.Parameter(draw(SHAPE, 0)) for _ in range(2))
    one, other = built(plain), built(interrupted)
    for t in range(1, 6):
        for p, stepping in ((plain, one), (interrupted, other)):
            p.grad = draw(SHAPE, t)
            stepping.step()
        other.expand_states()
        assert other.state[interrupted]["exp_avg"].dtype is torch.float32
    for stepping in (one, other):
        stepping.expand_states()
    assert torch.equal(plain, interrupted)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(one.state[plain][name], other.state[interrupted][name])


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (2**20, 2 * BLOCK):
        monkeypatch.setattr(optimizer, "CHUNK", chunk)
        p = nn.Parameter(draw(SHAPE, 0))
        stepping = built(p)
        for t in range(1, 4):
            p.grad = draw(SHAPE, t)
            stepping.step()
        stepping.expand_states()
        found.append((p.detach(), stepping.state[p]["exp_avg"], stepping.state[p]["exp_avg_sq"]))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


def test_vectors_have_the_bits_of_the_built_in_optimizer() -> None:
    ours, plain = nn.Parameter(draw((300,), 0)), nn.Parameter(draw((300,), 0))
    found = spec("router")
    assert found.parameter_options("decoder.layers.0.mlp.router.weight", True) == (
        found.parameter_options("decoder.final_layernorm.weight", False)
    )
    options = found.parameter_options("decoder.final_layernorm.weight", False)
    stepping = found.build([{"params": [ours], **options}])
    reference = torch.optim.AdamW(
        [plain], lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY, fused=True
    )
    for t in range(1, 5):
        for p, one in ((ours, stepping), (plain, reference)):
            p.grad = draw((300,), t)
            one.step()
    assert torch.equal(ours, plain)
    for name, state in reference.state[plain].items():
        assert torch.equal(stepping.state[ours][name], state)


def test_states_are_as_declared_and_as_adamws_in_a_checkpoint() -> None:
    found = spec()
    matrix, vector = nn.Parameter(draw((30, 20), 0)), nn.Parameter(draw((30,), 1))
    groups = [
        {"params": [p], **found.parameter_options("mlp.linear_fc1.weight", p.ndim > 1)}
        for p in (matrix, vector)
    ]
    stepping = found.build(groups)
    assert create_states(stepping, found.states) == []
    for p in (matrix, vector):
        state = stepping.state[p]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == p.shape
        assert not any(t.any() for t in state.values())
    stepping.state[matrix]["exp_avg"].copy_(draw((30, 20), 2))
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    stepping.step()
    assert state_problems(stepping, found.states) == []
    assert create_states(stepping, found.states) == []
    want = rounded(BETAS[0] * rounded(draw((30, 20), 2), signed=True), signed=True)
    got = stepping.state[matrix]["exp_avg"].double()
    assert float(((got - want).abs() > 1e-5 * want.abs()).double().mean()) < 1e-2


def test_a_parameter_without_gradient_has_no_step() -> None:
    left, right = nn.Parameter(draw((30, 20), 0)), nn.Parameter(draw((30, 20), 1))
    stepping = built(left, right)
    before = right.detach().clone()
    left.grad = draw((30, 20), 2)
    stepping.step()
    assert torch.equal(right, before)
    assert right not in stepping.state
