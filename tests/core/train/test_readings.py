"""What a line of the log says: speed, memory, the experts' load and their balancing loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.core.train import readings as readings_module
from ascend_run.core.train.readings import Readings
from ascend_run.testing.models import DENSE, MOE, samples
from ascend_run.testing.pool import GlooPool
from tests.support.clock import Clock
from tests.support.probed_runs import probe, train
from tests.support.small_runs import Training, Values, training

ALWAYS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "step_seconds",
    "memory_bytes",
    "memory_peak_bytes",
    "consumed_samples",
}


def readings_of(run: Training) -> Readings:
    return Readings(run.context, run.train_step, run.hooks)


def test_a_line_has_the_readings_of_its_step() -> None:
    with training({**DENSE, "train.global_batch_size": 4}) as run:
        readings = readings_of(run)
        results = [run.step() for _ in range(2)]
        for result in results:
            readings.add(result)
        run.context.step, run.context.consumed_samples = 2, 8
        line = readings.collect(results[-1])
        assert set(line) == ALWAYS
        assert (line["step"], line["consumed_samples"]) == (2, 8)
        assert line["loss"] == results[-1].loss
        assert line["lr"] == results[-1].learning_rate
        assert line["grad_norm"] == results[-1].grad_norm > 0
        trained = [int(row["loss_mask"].sum()) for row in samples(DENSE, 4)]
        assert results[0].totals.num_tokens == sum(trained) < 4 * 16
        tokens = line["tokens_per_second"] * line["step_seconds"] * 2
        assert tokens == pytest.approx(2 * results[0].totals.num_tokens)
        assert 0 < line["memory_bytes"] <= line["memory_peak_bytes"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What readings take for the time."""
    clock = Clock()
    monkeypatch.setattr(readings_module, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_what_comes_between_steps_does_not_count_as_their_time(clock: Clock) -> None:
    with training(DENSE) as run:
        readings = readings_of(run)
        readings.add(run.step())
        clock.now = 2.0
        with readings.untimed():
            clock.now = 102.0
        result = run.step()
        readings.add(result)
        clock.now = 106.0
        assert readings.collect(result)["step_seconds"] == (2.0 + 4.0) / 2


def test_a_skipped_step_says_so_with_its_loss_scale() -> None:
    with training({**DENSE, "train.precision": "fp16", "optimizer.hysteresis": 1}) as run:
        readings = readings_of(run)
        (chunk,) = run.bundle.chunks
        spoil = lambda gradient: torch.full_like(gradient, torch.inf)  # noqa: E731
        hook = chunk.module.decoder.final_layernorm.weight.register_hook(spoil)
        line = readings.collect(run.step())
        assert line["skipped"] is True
        assert line["grad_norm"] is None
        assert line["loss_scale"] == 2.0**15
        hook.remove()


def force(run: Training, chosen: tuple[int, int]) -> None:
    """Send every token to two experts."""
    (chunk,) = run.bundle.chunks
    for layer in chunk.module.decoder.layers:
        if not hasattr(layer.mlp, "router"):
            continue
        gating = layer.mlp.router.gating

        def forced(x: Tensor, gating: Any = gating) -> Tensor:
            favour = torch.zeros(4)
            favour[list(chosen)] = 100.0
            return gating(x) + favour

        layer.mlp.router.gating = forced


def test_the_load_of_a_forced_router_is_where_it_was_forced() -> None:
    with training(MOE) as run:
        readings = readings_of(run)
        force(run, (1, 3))
        line = readings.collect(run.step())
        assert line["expert_load"] == [0.0, 0.5, 0.0, 0.5]
        assert line["expert_load_by_layer"] == [[0.0, 0.5, 0.0, 0.5]] * 2


def test_the_load_of_each_layer_is_its_own(gloo_pool: GlooPool) -> None:
    """In a pipeline whose second stage has other experts to itself, and a first layer without."""
    stages = {
        "model.num_layers": 4,
        "model.moe_layer_freq": [0, 1, 1, 1],
        "parallel.pipeline_model_parallel_size": 2,
    }
    for line in gloo_pool.run(load_of_stages, 2, {**MOE, **stages}):
        first, second = [0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]
        assert line["expert_load_by_layer"] == [[], first, second, second]
        assert line["expert_load"] == pytest.approx([1 / 2, 1 / 6, 1 / 3, 0.0])


def load_of_stages(values: Values) -> dict[str, Any]:
    """Job: the line of one step, with routers forced by stage."""
    with training(values) as run:
        readings = readings_of(run)
        force(run, (0, 1) if run.context.layout.rank == 0 else (0, 2))
        return dict(readings.collect(run.step()))


def load_and_loss(values: Values, force_by_rank: bool) -> tuple[dict[str, Any], list[Any]]:
    """Job: the line of one step, and what this rank's routers were given and made."""
    with training(values) as run:
        readings = readings_of(run)
        if force_by_rank:
            force(run, (0, 1) if run.context.layout.rank == 0 else (0, 2))
        seen: list[Any] = []
        (chunk,) = run.bundle.chunks
        for layer in chunk.module.decoder.layers:
            layer.mlp.router.register_forward_hook(
                lambda router, inputs, out: seen.append(
                    (router.gating(inputs[0]).detach().double().flatten(0, 1), out[1])
                )
            )
        return dict(readings.collect(run.step())), seen


def test_the_load_is_of_all_ranks_tokens(gloo_pool: GlooPool) -> None:
    for line, _ in gloo_pool.run(load_and_loss, 2, MOE, True):
        assert line["expert_load"] == [0.5, 0.25, 0.25, 0.0]


@pytest.mark.exhaustive(by=lambda layout, world_size: [*layout, world_size > 1])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({}, 1),
        ({}, 2),
        ({"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}, 2),
        ({"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}, 4),
    ],
    ids=["alone", "dp", "tp", "tp dp"],
)
def test_the_balancing_loss_is_its_formula_over_all_ranks(
    gloo_pool: GlooPool, layout: Values, world_size: int
) -> None:
    values = {**MOE, **layout, "train.micro_batch_size": 1, "model.moe_aux_loss_coeff": 0.25}
    ranks = gloo_pool.run(load_and_loss, world_size, values, False)
    sharing = layout.get("parallel.tensor_model_parallel_size", 1)
    losses, counts = [], torch.zeros(4, dtype=torch.float64)
    for first in range(0, world_size, sharing):
        records = [seen for _, seen in ranks[first : first + sharing]]
        counts += sum(chosen.sum(dim=0) for seen in records for _, chosen in seen)
        for call in range(len(records[0])):  # every layer of every micro-batch
            logits = torch.cat([seen[call][0] for seen in records])
            chosen = torch.cat([seen[call][1] for seen in records]).double()
            shares = logits.softmax(dim=-1).mean(dim=0)
            losses.append(0.25 * 4 * float((chosen.mean(dim=0) / 2 * shares).sum()))
    for line, _ in ranks:
        assert line["aux_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert line["expert_load"] == pytest.approx((counts / counts.sum()).tolist())
        assert sum(line["expert_load"]) == pytest.approx(1.0)


def test_the_dropped_share_and_the_load_are_of_what_was_selected(gloo_pool: GlooPool) -> None:
    """On two ranks, each of which drops of its own tokens; a dropped selection counts as load and
    for the balancing loss."""
    values = {
        **MOE,
        "train.micro_batch_size": 1,
        "model.moe_expert_capacity_factor": 0.5,
        "model.moe_aux_loss_coeff": 0.25,
    }
    ranks = gloo_pool.run(load_and_loss, 2, values, False)
    capacity = 16 * 2 // 4 // 2  # of the 16 tokens of a forward, two experts each, of four
    losses, counts, dropped = [], torch.zeros(4, dtype=torch.float64), 0.0
    for logits, kept in (call for _, seen in ranks for call in seen):
        selected = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0)
        over = (selected.sum(dim=0) - capacity).clamp(min=0.0)
        assert torch.equal(kept.sum(dim=0), selected.sum(dim=0) - over)
        counts += selected.sum(dim=0)
        dropped += float(over.sum())
        shares = logits.softmax(dim=-1).mean(dim=0)
        losses.append(0.25 * 4 * float((selected.mean(dim=0) / 2 * shares).sum()))
    for line, _ in ranks:
        assert line["dropped_share"] == pytest.approx(dropped / float(counts.sum())) != 0
        assert line["expert_load"] == pytest.approx((counts / counts.sum()).tolist())
        assert line["aux_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_evaluation_before_the_first_step_does_not_count_as_its_time(
    tmp_path: Path, clock: Clock
) -> None:
    values = {
        "data.validation": [str(tmp_path / "tokens")],
        "train.eval_interval": 1,
        "train.eval_iters": 1,
    }

    def takes(seconds: float) -> Callable[[Any], None]:
        return lambda self: setattr(clock, "now", clock.now + seconds)

    evaluation = probe("ascend_before_evaluation", takes(100.0), "evaluation")
    step = probe("ascend_before_step", takes(3.0), "step")
    (line,) = train(tmp_path, evaluation, step, values=values).readings()
    assert line["step_seconds"] == 3.0
