"""A real run in three lines of a test: what it returns, how it resumes, what it says of errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ascend_run import testing
from ascend_run.plugin_api import AscendRunError, CheckpointError, ConfigError, RankFailure
from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.session_pool import SESSION_POOL
from tests.testing.counting_plugin import CountsSteps

SMALL = {"model.num_layers": 1, "train.global_batch_size": 2}
NAME = "counts-steps"


@pytest.fixture(autouse=True)
def discovered() -> Iterator[None]:
    """The plugin is discovered like an installed one."""
    with offered(CountsSteps):
        yield


def test_a_run_on_two_ranks_returns_what_it_logged_and_saved() -> None:
    run = testing.run(NAME, SMALL, ranks=2, steps=3, documents=[[1, 2, 3, 4] * 40])

    assert run.losses == run.metrics["loss"]
    assert run.losses[0] > run.losses[1] > run.losses[2] > 0
    assert run.metrics[f"{NAME}/steps"] == (1, 2, 3)
    saved = run.checkpoint(3)
    assert saved.values[NAME] == {"steps": 3}
    assert saved.tensors["model/embedding.word_embeddings.weight"].shape == (90, 32)
    log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert NAME in [line.get("plugin") for line in log if line["event"] == "plugin.enabled"]


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    first = testing.run(NAME, SMALL, steps=2)
    again, whole = first.resume(steps=1), testing.run(NAME, SMALL, steps=3)

    assert (again.first_step, again.last_step) == (3, 3)
    assert again.losses == whole.losses[2:]
    assert again.metrics[f"{NAME}/steps"] == (3,)
    assert again.checkpoint(3).differences(whole.checkpoint(3)) == []
    assert not (first.folder / "checkpoints/step_00000003").exists()

    forgetful = first.resume(steps=1, config={f"plugins.{NAME}.forgets": True})
    assert forgetful.checkpoint(3).differences(whole.checkpoint(3)) == [f"{NAME} differs"]


def test_the_folder_is_removed_with_the_run() -> None:
    run = testing.run(config=SMALL, steps=1)
    folder = run.folder
    assert folder.is_dir()
    del run
    assert not folder.parent.exists()


def test_what_was_not_logged_or_saved_is_named_beside_what_was() -> None:
    run = testing.run(NAME, {**SMALL, "checkpoint.save_interval": 1}, steps=2)

    with pytest.raises(KeyError, match=rf"no metric 'step' was logged; there are: .*{NAME}/steps"):
        run.metrics["step"]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 in .*; available: 1, 2"):
        run.checkpoint(4)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("counts-step", {}, "counts-steps"),
        (NAME, {"model.num_layer": 1}, "model.num_layers"),
        (NAME, {"data.seq_length": 13}, "data.seq_length=13 is unlucky; use 12 or 14"),
        (NAME, {"parallel.tensor_model_parallel_size": 2}, "1 rank"),
    ],
)
def test_a_run_that_cannot_start_is_one_message(
    name: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(AscendRunError, match=message):
        testing.run(name, {**SMALL, **config})


def test_a_failure_on_a_rank_names_the_plugin_and_the_hook() -> None:
    failing = {**SMALL, f"plugins.{NAME}.fails_in_step": 1}
    # Ranks of its own: a job that fails ends all ranks of its pool.
    with GlooPool() as pool, pytest.raises(RankFailure) as failure:
        testing.run(NAME, failing, steps=2, pool=pool)
    assert "step 1 failed" in str(failure.value)
    assert f"raised by '{NAME}'" in str(failure.value)
    assert "ascend_after_step" in str(failure.value)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0: expected at least 1"):
        testing.run(steps=0)


def test_outside_of_pytest_a_pool_must_be_given() -> None:
    token = SESSION_POOL.set(None)
    try:
        with pytest.raises(ConfigError, match=r"pytest is not running; pass one"):
            testing.run()
    finally:
        SESSION_POOL.reset(token)


def test_the_public_names_are_listed_without_importing_them() -> None:
    assert {"TrainingRun", "run"} <= {*dir(testing)}
    with pytest.raises(AttributeError, match="walk"):
        testing.walk
