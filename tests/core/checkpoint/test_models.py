"""Models and their optimizers on gloo ranks: one checkpoint, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.testing.pool import GlooPool

from . import model_jobs
from .model_jobs import VOCABULARY, Case
from .tensors import full_shard

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

DENSE = {
    "one rank": Case(),
    "dp 2": Case(dp=2),
    "dp 2, distributed optimizer": Case(dp=2, distributed_optimizer=True),
    "tp 2, pp 2": Case(tp=2, pp=2),
    "tp 2, dp 2, distributed optimizer": Case(tp=2, dp=2, distributed_optimizer=True),
}
EXPERTS = {
    "one rank": Case(experts=4),
    "ep 2": Case(experts=4, ep=2, dp=2),
    "ep 2, distributed optimizer": Case(experts=4, ep=2, dp=2, distributed_optimizer=True),
    "ep 2, pp 2": Case(experts=4, ep=2, dp=2, pp=2),
}


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of step 1, whole."""
    store = FileStore(folder)
    shards = [
        full_shard(key, torch.empty(stored.global_shape, dtype=DTYPES[stored.dtype]))
        for key, stored in store.manifest(1).tensors.items()
    ]
    store.load(1, shards)
    return {shard.key: shard.tensor for shard in shards}


def assert_same_contents(one: Path, other: Path) -> None:
    got, want = contents(one), contents(other)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key


def run(pool: GlooPool, job: object, case: Case, *folders: Path) -> None:
    pool.run(job, case.world_size, case, *map(str, folders), timeout=100)  # type: ignore[arg-type]


@pytest.mark.exhaustive(by=lambda precision: ())
@pytest.mark.parametrize(
    ("precision", "cases"),
    [("bf16", DENSE), ("fp32", EXPERTS)],
    ids=["dense bf16", "experts fp32"],
)
@pytest.mark.timeout(300)
def test_every_layout_writes_and_reads_the_same_checkpoint(
    gloo_pool: GlooPool, tmp_path: Path, precision: str, cases: dict[str, Case]
) -> None:
    names = [*cases]
    layouts = {name: attrs.evolve(case, precision=precision) for name, case in cases.items()}
    for name, case in layouts.items():
        run(gloo_pool, model_jobs.save, case, tmp_path / name)
        assert_same_contents(tmp_path / name, tmp_path / names[0])
    for writer, reader in zip(names, [*names[1:], names[0]], strict=True):
        again = tmp_path / f"{writer} to {reader}"
        run(gloo_pool, model_jobs.load_and_save, layouts[reader], tmp_path / writer, again)
        assert_same_contents(again, tmp_path / writer)


@pytest.mark.exhaustive(by=lambda precision: [precision] if precision == "bf16" else [])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.timeout(200)
def test_a_resumed_run_equals_the_uninterrupted_run(
    gloo_pool: GlooPool, tmp_path: Path, precision: str
) -> None:
    writer = Case(precision=precision, dp=2, distributed_optimizer=True)
    reader = Case(precision=precision, tp=2)
    run(gloo_pool, model_jobs.save, writer, tmp_path / "two steps")
    gloo_pool.run(model_jobs.save, 1, Case(precision=precision), str(tmp_path / "three"), 3)
    run(
        gloo_pool,
        model_jobs.continue_from,
        reader,
        tmp_path / "two steps",
        tmp_path / "two and one",
    )
    assert_same_contents(tmp_path / "two and one", tmp_path / "three")


@pytest.mark.timeout(200)
def test_tied_embeddings_are_saved_once_and_loaded_on_both_stages(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    one, two = Case(tied=True), Case(tied=True, pp=2)
    run(gloo_pool, model_jobs.save, one, tmp_path / "one")
    run(gloo_pool, model_jobs.save, two, tmp_path / "two")
    assert "model/output_layer.weight" not in contents(tmp_path / "one")
    assert_same_contents(tmp_path / "two", tmp_path / "one")
    run(gloo_pool, model_jobs.load_and_save, two, tmp_path / "one", tmp_path / "again")
    assert_same_contents(tmp_path / "again", tmp_path / "one")


def test_keys_and_shapes_are_those_of_the_full_model(gloo_pool: GlooPool, tmp_path: Path) -> None:
    case = Case(experts=4, ep=2, dp=2, precision="bf16")
    run(gloo_pool, model_jobs.save, case, tmp_path)
    tensors = FileStore(tmp_path).manifest(1).tensors
    shapes = {key: (stored.dtype, stored.global_shape) for key, stored in tensors.items()}
    layer = "decoder.layers.1.mlp"
    # The vocabulary's padding, which depends on the layout, is not saved.
    assert shapes["model/embedding.word_embeddings.weight"] == ("BF16", (VOCABULARY, 32))
    assert shapes[f"model/{layer}.experts.fc1"] == ("BF16", (4, 48, 32))
    assert shapes[f"optimizer/main_param/{layer}.experts.fc1"] == ("F32", (4, 48, 32))
    assert shapes[f"optimizer/exp_avg/{layer}.router.weight"] == ("F32", (4, 32))
    assert shapes[f"optimizer/step/{layer}.router.weight"] == ("F32", ())


def test_ranks_of_a_process_group_choose_alike(gloo_pool: GlooPool, tmp_path: Path) -> None:
    results = gloo_pool.run(model_jobs.corrupt_and_choose, 2, str(tmp_path))
    assert len(set(results)) == 1
    assert results[0].startswith("1 ")
    assert "rank 1: rank_0001.safetensors: tensor 't' has checksum" in results[0]
