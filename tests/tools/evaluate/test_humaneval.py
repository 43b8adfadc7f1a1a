"""HumanEval in its public format, by programs whose result is known."""

import gzip
import json
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import pytest

from ascend_run.ops.generation.sampling import Sampling
from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.tools.evaluate import judges, judging
from ascend_run.tools.evaluate.asking import ProgramOptions, TaskOptions
from ascend_run.tools.evaluate.judging import loaded_tasks
from ascend_run.tools.evaluate.page import render_page
from ascend_run.tools.evaluate.printing import lines_of
from ascend_run.tools.evaluate.prompts import Form
from ascend_run.tools.evaluate.results import Results
from ascend_run.tools.evaluate.sandbox import Limits, Outcome, SandboxError
from ascend_run.tools.evaluate.storing import read_results, write_results
from tests.tools.evaluate.fixed_model import FixedModel, marks, result_of, write_jsonl

pytestmark = [
    pytest.mark.usefixtures("sandbox"),
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
]
ADD = {
    "task_id": "Own/0",
    "prompt": 'from typing import List\n\ndef add(x: int, y: int):\n    """ Add them.\n    """\n',
    "canonical_solution": "    return x + y\n",
    "entry_point": "add",
    "test": "\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n",
}
TWICE = {
    "task_id": "Own/1",
    "prompt": "def one():\n    return 1\n\n\ndef twice(items):\n    ''' Repeat. '''\n",
    "canonical_solution": "    return items + items\n",
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate([one()]) == [1, 1]\n",
}
ALLOWED = ProgramOptions(limits=Limits(seconds=20.0))


@pytest.fixture
def named(tmp_path: Path) -> str:
    write_jsonl(tmp_path / "HumanEval.jsonl", [ADD, TWICE])
    return f"humaneval={tmp_path}"


def test_a_completion_is_right_if_its_tests_pass(named: str, tmp_path: Path) -> None:
    model = FixedModel(texts=[str(ADD["canonical_solution"]), "    return items\n"])
    result = result_of(named, model, programs=ALLOWED)
    assert marks(result) == [("passed", True), ("failed", False)]
    assert [one.why for one in result.judged] == [
        "its tests passed",
        "AssertionError, by assert candidate([one()]) == [1, 1]",
    ]
    assert [prompt.text for prompt in model.prompts] == [ADD["prompt"], TWICE["prompt"]]
    assert model.stop == ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    assert (result.scored_by, result.pass_at()) == ("tests", {1: 0.5})
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(ADD))
    model = FixedModel(texts=["    return x + y"])
    one = result_of(f"{named}/HumanEval.jsonl.gz", model, programs=ALLOWED)
    assert marks(one) == [("passed", True)]


def run_here(program: str, limits: Limits) -> Outcome:
    try:
        exec(program, {})
    except Exception as error:
        return Outcome(passed=False, how=str(error))
    return Outcome(passed=True, how="")


def test_the_forms_of_humaneval(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of all kinds: what an answer of a chat may look like."""
    for module in (judges, judging):
        monkeypatch.setattr(module, "run_program", run_here)
    chat = [
        "Here it is:\n```python\ndef add(x: int, y: List):\n    return x + y\n```\nDone.",
        "Use\n```\npip install x\n```\n```python\ndef twice(items):\n    return items * 2\n```",
    ]
    model = FixedModel(texts=chat)
    assert result_of(named, model, programs=ALLOWED, form=Form.CHAT).total.correct == 2
    assert model.stop == ()
    (turn,) = model.prompts[0].turns
    assert turn.startswith("The definition and function description of the python function are")
    assert turn.endswith(f"implementation of the python function.\n{ADD['prompt']}")
    model = FixedModel(texts=["return x + y", "```python\n    return items * 2"])
    assert result_of(named, model, programs=ALLOWED, form=Form.CHAT).total.correct == 2
    model = FixedModel(texts=["    return x + y", "    return items * 2"])
    assert result_of(named, model, programs=ALLOWED, form=Form.ALTERNATIVE).total.correct == 2
    assert model.prompts[0].text == f"Complete the following python code:\n{ADD['prompt']}"


def test_pass_at_k_is_that_of_samples(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 samples of two questions, of which 4 and none are right."""
    monkeypatch.setattr(
        judges,
        "run_program",
        lambda program, limits: Outcome(passed="right" in program, how="as it says"),
    )
    sampling = Sampling(temperature=0.5, top_p=0.9, seed=3)
    options = ProgramOptions(samples=11, sampling=sampling)
    model = FixedModel(texts=["right"] * 4 + ["no"] * 18)
    result = result_of(named, model, programs=options)
    assert model.sampling is sampling
    assert [prompt.text for prompt in model.prompts] == [ADD["prompt"]] * 11 + [
        TWICE["prompt"]
    ] * 11
    found = result.pass_at()
    assert {*found} == {1, 10, 11}
    for k in found:
        assert abs(found[k] - (1 - comb(7, k) / comb(11, k)) / 2) < 1e-15
    total = result.total
    assert (total.questions, total.correct) == (2, 4)
    assert abs(total.accuracy - 2 / 11) < 1e-15
    assert abs(total.standard_error - 2 / 11 / 2**0.5) < 1e-15
    assert [one.sample for one in result.judged] == [*range(1, 12)] * 2
    results = Results(model="m", tasks=(result,))
    write_results(results, tmp_path / "new", written=0.0)
    assert read_results(tmp_path / "new") == results
    (task,) = results.record()["tasks"]
    assert task["pass_at"] == {str(k): value for k, value in found.items()}
    assert task["programs"] == {"samples": 11, "sampling": "temperature 0.5, top-p 0.9, seed 3"}
    line = (
        "pass@1 18.18%, pass@10 50.00%, pass@11 50.00%: 11 programs for each question, by "
        "temperature 0.5, top-p 0.9, seed 3"
    )
    assert [*lines_of(results)][-1] == line
    page = render_page(results, written=0.0)
    assert line in page
    assert "1, answer 4: answer passed" in page


def test_a_problem_that_is_too_long_is_wrong(named: str) -> None:
    result = result_of(named, FixedModel(max_length=9), programs=ALLOWED)
    assert marks(result) == [(None, False)] * 2
    assert result.pass_at() == {1: 0.0}


def test_programs_are_run_only_if_that_is_allowed(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="allow it with --run-programs"):
        loaded_tasks([named], TaskOptions())
    with pytest.raises(ConfigError, match="--run-programs has no effect: no task has programs"):
        loaded_tasks([], TaskOptions(programs=ALLOWED))

    def refuse(program: str, limits: Limits) -> Outcome:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(judging, "run_program", refuse)
    with pytest.raises(ConfigError) as refused:
        loaded_tasks([named], TaskOptions(programs=ALLOWED))
    assert (
        "programs of humaneval cannot be confined on this machine (unshare: Operation not "
        "permitted), and are never run without; allow user namespaces (Linux: sysctl"
    ) in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setattr(judges, "run_program", refuse)
    with pytest.raises(ConfigError, match="a program could not be confined, and was not run: uns"):
        result_of(named, FixedModel(texts=["", ""]), programs=ALLOWED)


def test_bad_problems_are_one_message(tmp_path: Path) -> None:
    rows = [ADD, ADD | {"entry_point": "sub"}, ADD | {"test": "assert add"}, {"prompt": 3}]
    write_jsonl(tmp_path / "HumanEval.jsonl", rows)
    with pytest.raises(DataError) as refused:
        loaded_tasks([f"humaneval={tmp_path}"], TaskOptions(programs=ALLOWED))
    file = tmp_path / "HumanEval.jsonl"
    for problem in (
        f"{file}:2: expected 'def sub' under key 'prompt', as entry_point says",
        f"{file}:3: expected 'def check' under key 'test'",
        f"{file}:4: expected text under key 'prompt', got int",
        f"{file}:4: expected text under key 'test', got nothing",
    ):
        assert problem in str(refused.value)
    with pytest.raises(DataError, match=r"no HumanEval.jsonl or HumanEval.jsonl.gz"):
        loaded_tasks([f"humaneval={tmp_path.parent}"], TaskOptions(programs=ALLOWED))


def test_the_command_draws_programs_and_runs_them(
    folder: Path, named: str, evaluate: Callable[..., Any]
) -> None:
    words = [folder, "--task", named, "--run-programs", "--max-new-tokens", 3, "--limit", 1]
    words += ["--samples", 2, "--temperature", 9.0]
    (task,) = evaluate(*words, "--seed", 1)["tasks"]
    assert (task["task"], task["scored_by"], task["questions"]) == ("humaneval", "tests", 1)
    assert {*task["pass_at"]} == {"1", "2"}
    assert task["programs"]["sampling"] == "temperature 9, top-p 1, seed 1"


def test_options_of_programs_are_checked(
    folder: Path, named: str, refused: Callable[..., str]
) -> None:
    words = [folder, "--task", named]
    assert "allow it with --run-programs" in refused(*words)
    message = refused(*words, "--samples", 2, "--top-p", 3)
    assert "--samples, --top-p: no effect without --run-programs" in message
    assert "--top-p 3.0: expected a number from 0 to 1" in message
    message = refused(*words, "--run-programs", "--samples", 2)
    assert "--samples: no effect without draws; say --temperature above 0" in message
