"""The adapters of a reference: those that a run began with, not those that it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Ended, assert_the_same_in_two_halves, whole_run
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.task_runs import run_values

from .peft_models import ALPHA, RANK, peft_model, write_peft

pytestmark = pytest.mark.needs_plugins("dpo")

STEPS = 4
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp=2, sp": (2, {TP: 2, "parallel.sequence_parallel": True}),
    "pp=2": (2, {PP: 2}),
    "dp=2, distributed optimizer": (2, {"ddp.use_distributed_optimizer": True}),
}
Run = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, two adapters of it, and it with the first one merged."""
    folder = write_models_and_pairs(tmp_path_factory.mktemp("loaded"), STEPS * 4)
    for seed, name in enumerate(("adapter", "another")):
        write_peft(peft_model(folder / "model", seed=seed), folder / name)
    peft_model(folder / "model", seed=0).merge_and_unload().save_pretrained(folder / "merged")
    return folder


@pytest.fixture
def run(gloo_pool: GlooPool, models: Path, tmp_path: Path) -> Run:
    """Return a function that trains an adapter on pairs, and returns what its ranks have."""

    def train(name: str, layout: str = "one", load: str = "adapter", **changes: Any) -> list[Ended]:
        ranks, split = LAYOUTS[layout]
        options = {
            **split,
            "data__seq_length": 128,
            "train__train_iters": STEPS,
            "train__log_interval": 1,
            "plugins__dpo__packing": False,
            "plugins__dpo__reference": "base",
            "plugins__lora__load": str(models / load),
            "plugins__lora__rank": RANK,
            "plugins__lora__alpha": float(ALPHA),
            "plugins__lora__export": False,
            **changes,
        }
        values = run_values("dpo", models, tmp_path / name, **options)
        return gloo_pool.run(whole_run, ranks, values, ("lora",), timeout=100)

    return train


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_has_the_adapters_that_were_loaded(run: Run, models: Path, layout: str) -> None:
    base = run("base", layout)[0]
    merged = run("merged", layout, plugins__dpo__reference=str(models / "merged"))[0]
    assert_equal_steps(merged.readings, base.readings)
    assert base.readings[0]["rewards/margins"] == 0.0
    assert base.readings[-1]["rewards/margins"] > 0.01


def test_a_resumed_run_has_them_still(run: Run) -> None:
    assert_the_same_in_two_halves(run, STEPS, 2)


def test_a_run_does_not_resume_with_others(run: Run, models: Path) -> None:
    run("run", train__train_iters=2, checkpoint__save_interval=2)
    with pytest.raises(Exception, match=f"plugins.lora.load={models / 'another'} holds other"):
        run("run", load="another")
    # They are no part of a reference with a folder of its own.
    folder = str(models / "model")
    run("named", train__train_iters=2, checkpoint__save_interval=2, plugins__dpo__reference=folder)
    run("named", load="another", plugins__dpo__reference=folder)
