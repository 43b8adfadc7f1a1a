"""Platform npu with its device code, on two gloo ranks: the demo's layers, against the CPU."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from ascend_run.prepare.prepare import prepare
from ascend_run.testing.models import MOE, trial_layout
from ascend_run.testing.parity import TRAINED_TOLERANCE, compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.demo import NEEDS_ITS_FEATURES

from .stand_in import Seen, npu_on_the_cpu

FEATURES = ("ulysses", "gmm", "swap-attention")
DEMO = {**MOE, **trial_layout({"cp": 2}), "plugins.swap-attention.min_bytes": 1}
"""The layers of examples/demo.toml: gated experts, grouped queries, RMS norm, rotary."""
PLAIN = {**MOE, "platform": "cpu"}


def on_the_npu(trial: Trial) -> tuple[RankOutcome, Seen]:
    """Run a trial. A job of the pool."""
    with npu_on_the_cpu() as seen:
        outcome = run_trial(attrs.evolve(trial, config={**trial.config, "platform": "npu"}))
    return outcome, attrs.evolve(seen, options=[str(o) for o in seen.options])


def on_the_cpu(trial: Trial) -> RankOutcome:
    return run_trial(trial)


@pytest.mark.exhaustive(by=lambda dtype, steps: [dtype, steps])
@NEEDS_ITS_FEATURES
@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"),
    [("float64", 0, 1e-10), ("float32", 0, 1e-6), ("float32", 5, TRAINED_TOLERANCE)],
    ids=["gradients-float64", "gradients-float32", "five-steps"],
)
def test_the_demos_layers_are_those_of_the_cpu(
    gloo_pool: GlooPool, dtype: str, steps: int, tolerance: float
) -> None:
    trial = Trial(plugins=FEATURES, config=DEMO, dtype=dtype, steps=steps)
    results = gloo_pool.run(on_the_npu, 2, trial, timeout=100)
    plain = gloo_pool.run(on_the_cpu, 1, Trial(config=PLAIN, dtype=dtype, steps=steps), timeout=100)
    outcomes = [outcome for outcome, _ in results]
    assert [*compare(outcomes, plain, tolerance)] == []
    for rank, (_, seen) in enumerate(results):
        assert seen.devices == [f"npu:{rank}"]
        assert seen.calls["set_device"] == 1
        assert seen.pinned > 0, "what is swapped out lies in pinned memory"
        assert seen.calls["Stream"] == 2, "a stream each way"
        assert seen.operators["npu_fusion_attention"] == seen.operators["npu_fusion_attention_grad"]
        assert seen.operators.keys() >= OF_THE_DEMO


OF_THE_DEMO = {
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_swiglu_backward",
}

RUN = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
       "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
       "data.seq_length=16", "parallel.tensor_model_parallel_size=2"]  # fmt: skip


def groups_of_a_run() -> tuple[Seen, str, float, tuple[int, int], Counter[str]]:
    """Run only a run's device and groups, from the default group on, as launched. A job of the
    pool."""
    from ascend_run.core.run import prepared_rank

    rank, size = dist.get_rank(), dist.get_world_size()
    address: list[Any] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = [free.getsockname()[1]]
    dist.broadcast_object_list(address)
    dist.barrier()
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": address[0]}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with npu_on_the_cpu() as seen:
        prepared = prepare(None, RUN, platform="npu", world_size=size)
        with prepared_rank(prepared.run_request()) as (_, context):
            total = torch.ones(1)
            dist.all_reduce(total, group=context.groups.tp)
            context.device.reset_peak_memory()
            context.device.synchronize()
            memory = context.device.memory_bytes()
            backend = dist.get_backend()
    return seen, backend, float(total), memory, seen.calls


def test_a_runs_groups_are_hccls_and_its_memory_is_the_devices(gloo_pool: GlooPool) -> None:
    for seen, backend, total, memory, calls in gloo_pool.run(groups_of_a_run, 2, timeout=60):
        assert seen.backends[0] == "hccl"
        assert backend == "gloo"
        assert seen.options == []
        assert total == 2
        assert memory == (4096, 4096), "the peak was reset"
        assert calls["synchronize"] == calls["reset_peak_memory_stats"] == 1
