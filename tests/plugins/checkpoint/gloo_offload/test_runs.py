"""Runs that save and resume with the plugin: bitwise equal checkpoints from fewer writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.plugin_api import TensorShard
from ascend_run.testing.pool import GlooPool

from . import jobs

WITH = {"enable": ["gloo-offload"], "plugins.gloo-offload.slice_elements": 1000}
TP, EP = "parallel.tensor_model_parallel_size", "parallel.expert_model_parallel_size"
PP, SPREAD = "parallel.pipeline_model_parallel_size", "ddp.use_distributed_optimizer"
LAYOUTS: list[tuple[int, str, dict[str, Any], list[int]]] = [
    # ranks, model, layout, ranks that write
    (1, "dense", {}, [0]),
    (2, "dense", {}, [0]),
    (4, "dense", {TP: 2, "parallel.sequence_parallel": True}, [0, 1]),
    (2, "dense", {SPREAD: True}, [0]),
    (4, "moe", {EP: 2, SPREAD: True}, [0]),
    (4, "dense", {PP: 2, SPREAD: True}, [0, 2]),
]
DTYPES = {"F32": torch.float32, "U8": torch.uint8, "I64": torch.int64, "F64": torch.float64}


def stored(folder: Path, step: int) -> dict[str, Tensor]:
    """Return every full tensor of a checkpoint."""
    store = FileStore(folder / "run/checkpoints")
    shards = [
        TensorShard(
            key=key,
            tensor=torch.empty(tensor.global_shape, dtype=DTYPES[tensor.dtype]),
            global_shape=tensor.global_shape,
            offset=(0,) * len(tensor.global_shape),
        )
        for key, tensor in store.manifest(step).tensors.items()
    ]
    store.load(step, shards)
    return {shard.key: shard.tensor for shard in shards}


@pytest.mark.exhaustive(
    by=lambda ranks, layout: (
        [PP in layout] if SPREAD in layout and (ranks == 2 or PP in layout) else []
    )
)
@pytest.mark.parametrize(("ranks", "model", "layout", "writers"), LAYOUTS, ids=str)
def test_checkpoints_with_and_without_it_are_equal_and_both_resume(
    gloo_pool: GlooPool,
    tmp_path: Path,
    ranks: int,
    model: str,
    layout: dict[str, Any],
    writers: list[int],
) -> None:
    def run(name: str, iterations: int, values: dict[str, Any]) -> list[dict[str, Any]]:
        folder = str(tmp_path / name)
        return gloo_pool.run(jobs.run, ranks, folder, iterations, {**layout, **values}, model)

    run("plain", 2, {})
    run("gathered", 2, WITH)
    plain, gathered = stored(tmp_path / "plain", 2), stored(tmp_path / "gathered", 2)
    assert any(key.startswith("optimizer/exp_avg/") for key in plain)
    assert plain.keys() == gathered.keys()
    for key, tensor in plain.items():
        assert torch.equal(tensor, gathered[key]), key
    files = sorted(FileStore(tmp_path / "gathered/run/checkpoints").manifest(2).files)
    assert files == [f"rank_{rank:04d}.safetensors" for rank in writers]

    if SPREAD not in layout or PP in layout:
        return  # bitwise equal, so resuming from them was tested above
    through = run("through", 4, {})
    for resumed in run("plain", 4, WITH), run("gathered", 4, {}):
        assert resumed[0]["losses"] == through[0]["losses"]
        for one, other in zip(resumed, through, strict=True):
            for name, weight in other["weights"].items():
                assert torch.equal(one["weights"][name], weight), name


def test_a_run_that_saved_through_it_resumes_through_it(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    values = {EP: 2, SPREAD: True}
    through = gloo_pool.run(jobs.run, 4, str(tmp_path / "through"), 4, values, "moe")
    for iterations in (2, 4):
        folder = str(tmp_path / "moved")
        resumed = gloo_pool.run(jobs.run, 4, folder, iterations, {**values, **WITH}, "moe")
    assert resumed[0]["losses"] == through[0]["losses"]


def test_states_that_are_spread_travel_and_those_of_the_first_rank_do_not(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    writer, _ = gloo_pool.run(jobs.run, 2, str(tmp_path), 2, {**WITH, SPREAD: True}, "dense")
    tensors = stored(tmp_path, 2)
    states = [t for key, t in tensors.items() if key.startswith("optimizer/exp_avg")]
    generators = [t for key, t in tensors.items() if key.startswith("rng/rank_00001/")]
    everything, own = (sum(t.nbytes for t in some) for some in (states, generators))
    received = writer["readings"]["gloo-offload/received_bytes"] - own
    assert 0.4 * everything < received < 0.6 * everything  # one of two ranks' shards


def test_it_counts_what_travelled(gloo_pool: GlooPool, tmp_path: Path) -> None:
    writer, _ = gloo_pool.run(jobs.run, 2, str(tmp_path), 2, WITH, "dense")
    readings = writer["readings"]
    # The second rank writes only its random generators: the rest are replicas. The last metrics
    # follow one of the two saves.
    own = [t for key, t in stored(tmp_path, 2).items() if key.startswith("rng/rank_00001/")]
    assert readings["gloo-offload/received_bytes"] == sum(tensor.nbytes for tensor in own)
    assert readings["gloo-offload/messages"] > 0
    assert readings["gloo-offload/sent_bytes"] == 0


def test_no_group_of_another_backend_is_made(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for backends in gloo_pool.run(jobs.backends_asked_for, 2, str(tmp_path), WITH):
        assert backends == []
