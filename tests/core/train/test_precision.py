"""Half precision: loss scales, master weights, and that every precision learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import Training, Values, training

FP16 = {
    **DENSE,
    "train.precision": "fp16",
    "train.micro_batch_size": 4,
    "train.train_iters": 100,
    "optimizer.lr_warmup_iters": 0,
    "optimizer.initial_loss_scale": 2.0**7,
    "optimizer.loss_scale_window": 3,
    "optimizer.hysteresis": 2,
}


def bits(run: Training) -> list[Tensor]:
    """Weights, master weights and the optimizer's state."""
    inner = [part.optimizer for part in run.bundle.optimizer.chained_optimizers]
    stepped = [p for o in inner for group in o.param_groups for p in group["params"]]
    states = [value for o in inner for state in o.state.values() for value in state.values()]
    return [t.detach().clone() for t in (*run.parameters.values(), *stepped, *states)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def overflow_once(parameter: torch.nn.Parameter) -> Any:
    """Spoil the next gradient of one parameter."""
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


def test_an_overflow_skips_the_step_and_the_scale_falls_and_recovers() -> None:
    with training(FP16) as run:
        (chunk,) = run.bundle.chunks
        spoiled = overflow_once(chunk.module.decoder.layers[0].self_attention.linear_qkv.weight)
        before, rate = bits(run), run.train_step.bundle.optimizer.param_groups[0]["lr"]
        scales = []
        for _ in range(3):
            result = run.step()
            assert result.skipped
            assert result.grad_norm is None
            scales.append(run.train_step.loss_scale)
        assert scales == [2.0**7, 2.0**6, 2.0**5]  # the first is forgiven: hysteresis 2
        assert same(bits(run), before)
        assert run.train_step.bundle.optimizer.param_groups[0]["lr"] == rate
        assert run.bundle.scheduler.num_steps == 0
        spoiled.remove()
        for scale in (2.0**5, 2.0**5, 2.0**6):  # three sound steps are the window
            result = run.step()
            assert not result.skipped
            assert result.learning_rate > 0
            assert run.train_step.loss_scale == scale
        assert not same(bits(run), before)


def test_the_scale_does_not_fall_below_its_least() -> None:
    values = {**FP16, "optimizer.min_loss_scale": 2.0**6, "optimizer.hysteresis": 1}
    with training(values) as run:
        (chunk,) = run.bundle.chunks
        overflow_once(chunk.module.decoder.final_layernorm.weight)
        for _ in range(3):
            run.step()
        assert run.train_step.loss_scale == 2.0**6


def test_the_scale_leaves_no_trace_in_the_update() -> None:
    """Powers of two are exact; only what would underflow differs."""
    norms, weights = [], []
    for scale in (2.0**4, 2.0**8):
        with training({**FP16, "optimizer.initial_loss_scale": scale}) as run:
            norms.append(run.step().grad_norm)
            weights.append(run.parameters["decoder.layers.0.mlp.linear_fc1.weight"].clone())
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    torch.testing.assert_close(*weights, rtol=2e-3, atol=1e-5)


def test_a_constant_scale_stays_and_still_skips_an_overflow() -> None:
    with training({**FP16, "optimizer.loss_scale": 64.0}) as run:
        assert not run.step().skipped
        before = bits(run)
        (chunk,) = run.bundle.chunks
        overflow_once(chunk.module.decoder.final_layernorm.weight)
        for _ in range(3):
            assert run.step().skipped
            assert run.train_step.loss_scale == 64.0
        assert same(bits(run), before)


def spoil_an_expert(values: Values) -> tuple[list[float], bool, float]:
    """Job: only rank 1's experts overflow; scales of all optimizers, whether bits stayed, and
    the next step's norm over the norm before."""
    with training(values) as run:
        sound = run.step().grad_norm
        before = bits(run)
        (chunk,) = run.bundle.chunks
        spoiled = None
        if run.context.groups.ep.rank() == 1:
            spoiled = overflow_once(chunk.module.decoder.layers[1].mlp.experts.fc1)
        assert run.step().skipped
        stayed = same(bits(run), before)
        if spoiled is not None:
            spoiled.remove()
        again = run.step().grad_norm
        parts = run.bundle.optimizer.chained_optimizers
        return [float(part.get_loss_scale()) for part in parts], stayed, again / sound


def test_an_overflow_in_one_ranks_experts_moves_the_one_scale_of_all(gloo_pool: GlooPool) -> None:
    values = {
        **MOE,
        **{k: v for k, v in FP16.items() if k.startswith(("train.", "optimizer."))},
        "train.micro_batch_size": 1,
        "optimizer.hysteresis": 1,
        "optimizer.loss_scale_window": 100,
        "optimizer.lr": 1e-6,
        "parallel.expert_model_parallel_size": 2,
    }
    for scales, stayed, ratio in gloo_pool.run(spoil_an_expert, 2, values):
        assert scales == [2.0**6, 2.0**6]
        assert stayed
        assert ratio == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_weights_are_their_float32_masters_rounded(precision: str, micro_batch_size: int) -> None:
    options = {"train.precision": precision, "train.micro_batch_size": micro_batch_size}
    with training({**FP16, **options}) as run:
        for _ in range(4):
            run.step()
        (part,) = run.bundle.optimizer.chained_optimizers
        pairs = [
            pair
            for models, masters in zip(
                part.float16_groups, part.fp32_from_float16_groups, strict=True
            )
            for pair in zip(models, masters, strict=True)
        ]
        assert len(pairs) == len(run.parameters)
        assert part.fp32_from_fp32_groups == [[], []]
        for model, master in pairs:
            assert master.dtype is torch.float32
            assert torch.equal(model, master.to(model.dtype))
        assert any((model.float() != master).any() for model, master in pairs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("values", [DENSE, MOE], ids=["dense", "moe"])
def test_every_precision_learns_a_batch_by_heart(values: Values, precision: str) -> None:
    options = {
        "train.precision": precision,
        "train.train_iters": 30,
        "train.micro_batch_size": 2,
        "optimizer.lr": 0.01,
        "optimizer.adam_eps": 1e-8,
    }
    with training({**values, **options}) as run:
        losses = [run.step().loss for _ in range(30)]
    assert losses[0] == pytest.approx(4.5, abs=0.3)
    assert losses[-1] < 1.0
