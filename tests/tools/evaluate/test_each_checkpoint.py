"""Checkpoints of a run: each has the scores of an evaluation of its own, drawn by the report."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run import testing
from ascend_run.plugin_api import CheckpointError
from ascend_run.testing.models import DENSE
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.evaluate import each_checkpoint
from ascend_run.tools.evaluate.each_checkpoint import (
    EachCheckpoint,
    Evaluated,
    evaluate_each,
    scores,
)
from ascend_run.tools.evaluate.evaluating import Evaluation
from ascend_run.tools.evaluate.results import HarnessScore, Results
from ascend_run.tools.evaluate.token_streams import DataOptions
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.charts import charts_of
from ascend_run.tools.report.page import write_report
from tests.support.generated import write_words

from .fixed_model import write_mmlu

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")
Asked = Callable[..., list[Evaluated]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of three steps; a file of text and MMLU beside it."""
    root = tmp_path_factory.mktemp("trained")
    values: dict[str, Any] = {"checkpoint.save_interval": 1, "optimizer.lr": 0.05}
    run = testing.run((), values, steps=3)
    shutil.copytree(run.folder, root / "run")
    write_words(root, int(str(DENSE["model.vocab_size"])))
    (root / "held-out.txt").write_text("w3 w1 w4 w1 w5 w9 w2 w6 w5 w3")
    write_mmlu(root / "mmlu")
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.fixture
def asked(trained: Path, run: Path) -> Evaluation:
    return Evaluation(
        model=run,
        options=SourceOptions(),
        tokenizer=trained / "tokenizer.json",
        dtype="fp64",
        data=(str(trained / "held-out.txt"),),
        reading=DataOptions(append_eod=False),
    )


def quietly(stage: str, done: int, total: int) -> None:
    """Show no progress."""


def words(trained: Path, run: Path) -> list[object]:
    task = ["--task", f"mmlu={trained / 'mmlu'}", "--shots", 0, "--no-append-eod"]
    return [run, trained / "held-out.txt", *task, "--tokenizer", trained / "tokenizer.json"]


def test_each_has_the_scores_of_its_step_and_the_report_draws_them(
    trained: Path, run: Path, evaluate: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from ascend_run.entrypoints.cli import run as run_command

    given = [*words(trained, run), "--dtype", "fp64"]
    assert run_command(["evaluate", *map(str, given), "--every", "2", "--json"]) == 0
    assert run_command(["evaluate", *map(str, given), "--every", "1", "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in printed] == [2, 1, 3]  # what has scores is left out
    curves = {chart.curve.title: chart.lines[0].series for chart in charts_of([read_run(run)])}
    scores: dict[str, list[float]] = {"mmlu accuracy": []}
    for step in (1, 2, 3):
        alone = evaluate(*words(trained, run), "--step", step)
        (mine,) = (one for one in printed if one["step"] == step)
        assert [mine["perplexity"], mine["tasks"]] == [alone["perplexity"], alone["tasks"]]
        scores["mmlu accuracy"].append(alone["tasks"][0]["accuracy"])
        for name in ("loss", "perplexity"):
            (found,) = alone["perplexity"]
            scores.setdefault(f"{found['name']} {name}", []).append(found[name])
    for title, values in scores.items():
        assert (curves[title].steps, [*curves[title].values]) == ((1, 2, 3), values)
    assert len({*scores[f"{trained / 'held-out.txt'} loss"]}) == 3
    write_report([read_run(run)], run / "report.html")
    assert "mmlu accuracy" in (run / "report.html").read_text()


def test_new_checkpoints_are_awaited_until_the_run_ends(run: Path, asked: Evaluation) -> None:
    """The last one may come with the end of the run; one that is removed meanwhile is left out."""
    checkpoints, metrics = run / "checkpoints", run / "metrics.jsonl"
    kept, ended = run.with_name("kept"), metrics.read_text()
    shutil.move(checkpoints, kept)
    metrics.write_text("".join(ended.splitlines(keepends=True)[:-1]))
    waits = iter(range(9))

    def wait(seconds: float) -> None:
        turn = next(waits)
        if turn == 0:
            shutil.copytree(kept / "step_00000001", checkpoints / "step_00000001")
        if turn == 1:
            metrics.write_text(ended)
            shutil.copytree(kept / "step_00000003", checkpoints / "step_00000003")

    found = [*evaluate_each(asked, EachCheckpoint(follow=True), quietly, wait)]
    assert [one.step for one in found] == [1, 3]
    assert next(waits) == 2
    assert [*evaluate_each(asked, EachCheckpoint(follow=True), quietly, wait)] == []


def test_a_step_that_is_saved_again_is_evaluated_again(run: Path, asked: Evaluation) -> None:
    """As if the scores were of a checkpoint that was there before."""
    (once,) = evaluate_each(asked, EachCheckpoint(every=3), quietly)
    file = run / "evaluations.jsonl"
    line = json.loads(file.read_text())
    assert line["asked"]["data"] == [*asked.data]
    assert line["asked"]["reading"]["append_eod"] is False
    older = {"checkpoint": "0" * 64, "values": dict.fromkeys(line["values"], 0.5)}
    file.write_text(json.dumps({**line, **older}) + "\n" + '{"step": 3, "cut')
    (again,) = evaluate_each(asked, EachCheckpoint(every=3), quietly)
    assert once == again
    (found,) = read_run(run).evaluations
    assert (found.step, found.values) == (3, line["values"])


def test_a_checkpoint_that_goes_is_left_out_and_a_damaged_one_is_an_error(
    run: Path, asked: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(asked: Evaluation, progress: object) -> None:
        if asked.options.step == 1:
            shutil.rmtree(run / "checkpoints/step_00000001")
        raise CheckpointError("it cannot be read")

    monkeypatch.setattr(each_checkpoint, "evaluated", gone)
    found = evaluate_each(asked, EachCheckpoint(), quietly)
    assert next(found) == Evaluated(step=1, results=None)
    with pytest.raises(CheckpointError, match="it cannot be read"):
        next(found)


def test_other_options_have_a_name_of_their_own(
    trained: Path, run: Path, refused: Callable[..., str]
) -> None:
    from ascend_run.entrypoints.cli import run as run_command

    given = [*map(str, words(trained, run)), "--every", "3"]
    assert run_command(["evaluate", *given]) == 0
    assert "has scores of other data or options without a name" in refused(*given, "--window", 4)
    assert run_command(["evaluate", *given, "--window", "4", "--name", "short"]) == 0
    (found,) = read_run(run).evaluations
    losses = [found.number(f"{name}{trained / 'held-out.txt'} loss") for name in ("", "short: ")]
    assert None not in losses
    assert losses[0] != losses[1]
    answers = sorted(path.name for path in (run / "evaluations").iterdir())
    assert answers == ["default", "short"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "--step", "1"], "leave out --step"),
        (["--every", "1", "--output", "x", "--config", "y"], "leave out --config, --output"),
        (["--name", "a"], "--name goes with --every or --follow"),
        (["--every", "1", "--name", "../a"], "expected letters, digits, dots, - and _"),
        (["--every", "0"], "every"),
    ],
    ids=["step", "output", "name", "folder", "zero"],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, refused: Callable[..., str], options: list[str], message: str
) -> None:
    assert message in refused(tmp_path, "data.txt", *options)


def test_what_is_no_run_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused(tmp_path, "data.txt", "--follow")
    assert f"{tmp_path} is no folder of a run: it has no config.toml" in message


def test_metrics_of_the_harness_are_scores_too() -> None:
    rows = [("none", 0.5), ("strict-match", 0.25)]
    found = tuple(
        HarnessScore(
            task="quiz", metric="acc", filter=name, value=value, error=None, shots=0, questions=4
        )
        for name, value in rows
    )
    results = Results(model="m", harness=found)
    assert scores(results) == {"quiz acc": 0.5, "quiz acc,strict-match": 0.25}
