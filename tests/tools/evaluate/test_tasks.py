"""Benchmarks in their public formats, by a model whose score is known by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.tools.evaluate.asking import ScoredBy, TaskOptions
from ascend_run.tools.evaluate.judging import loaded_tasks
from ascend_run.tools.evaluate.prompts import Form
from ascend_run.tools.evaluate.tasks import TASKS
from tests.tools.evaluate.fixed_model import (
    FixedModel,
    marks,
    result_of,
    write_csv,
    write_jsonl,
    write_mmlu,
)

TEXT = ScoredBy.TEXT
HEADER = "The following are multiple choice questions (with answers) about abstract algebra.\n\n"


def test_mmlu_by_log_probability(tmp_path: Path) -> None:
    model = FixedModel(best=["B", "A", "A", "C"])
    result = result_of(f"mmlu={write_mmlu(tmp_path)}", model)
    assert marks(result) == [("B", True), ("A", False), ("A", True), ("C", True)]
    assert [(s.subject, s.questions, s.correct) for s in result.scores()] == [
        ("abstract_algebra", 3, 2),
        ("virology", 1, 1),
    ]
    assert (result.total.questions, result.total.accuracy) == (4, 0.75)
    assert abs(result.total.standard_error - (0.75 * 0.25 / 4) ** 0.5) < 1e-15
    assert model.continuations == [" A", " B", " C", " D"] * 4
    assert [one.number for one in result.judged] == [1, 3, 4, 1]
    assert result.judged[1].log_probabilities == (("A", -1.0), ("B", -2.0), ("C", -2.0), ("D", -2))


def test_mmlu_by_generated_letters(tmp_path: Path) -> None:
    model = FixedModel(texts=[" B. two\n", "The answer is (D).", "a good question", "A or B"])
    result = result_of(f"mmlu={write_mmlu(tmp_path)}", model, scored_by=TEXT)
    assert marks(result) == [("B", True), ("D", True), (None, False), (None, False)]
    assert result.judged[2].why == "the text names none of the labels, or several"
    assert result.judged[1].text == "The answer is (D)."
    assert (result.scored_by, model.stop) == ("text", ("\n\n",))


def test_the_three_forms_of_mmlu(tmp_path: Path) -> None:
    path = f"mmlu={write_mmlu(tmp_path)}"
    example = "example 0?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    question = "2 + 2?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    prompts = {}
    for form in Form:
        model = FixedModel(best="BDAC")
        result = result_of(path, model, form=form, num_examples=1)
        assert result.total.correct == 4
        prompts[form] = model.prompts[1]
        assert result.judged[1].examples == 1
    assert prompts[Form.DIRECT].text == f"{HEADER}{example} A\n\n{question}"
    assert prompts[Form.CHAT].turns == (HEADER + example, "A", question)
    asked = (
        "There is a single choice question about abstract algebra. Answer the question by replying "
        "A, B, C or D.\nQuestion: "
    )
    assert prompts[Form.ALTERNATIVE].text == f"{asked}{example} A\n\n{asked}{question}"


def test_a_prompt_that_is_too_long_has_fewer_examples(tmp_path: Path) -> None:
    """Until a question alone is too long, which is wrong."""
    path = f"mmlu={write_mmlu(tmp_path)}"
    model = FixedModel(best="BDAC")
    result_of(path, model)
    longest = max(len(prompt.text) for prompt in model.prompts) + TASKS["mmlu"].max_new_tokens
    got = [
        [one.examples for one in result_of(path, FixedModel(best="BDAC", max_length=n)).judged]
        for n in (longest, longest - 1)
    ]
    assert got == [[2, 2, 2, 2], [1, 2, 2, 2]]
    result = result_of(path, FixedModel(max_length=20))
    assert marks(result) == [(None, False)] * 4
    assert result.judged[0].why == "the question is longer than the model's longest text"


def test_a_limit_is_for_each_subject(tmp_path: Path) -> None:
    result = result_of(f"mmlu={write_mmlu(tmp_path)}", FixedModel(best="BD"), limit=1)
    assert marks(result) == [("B", True), ("D", False)]


def test_one_split_or_one_file_of_an_exam_is_read(tmp_path: Path) -> None:
    write_mmlu(tmp_path)
    file = tmp_path / "test" / "virology_test.csv"
    for path, questions in ((tmp_path / "test", 4), (file, 1)):
        (loaded,) = loaded_tasks([f"mmlu={path}"], TaskOptions())
        assert sum(len(one.questions) for one in loaded.subjects) == questions
        assert all(len(one.examples) == 2 for one in loaded.subjects)


def exam(header: list[str], rows: list[list[str]]) -> Callable[[Path], None]:
    return lambda path: write_csv(path, [header, *rows])


@pytest.mark.parametrize("name", ["ceval", "cmmlu"])
def test_chinese_exams(tmp_path: Path, name: str) -> None:
    rows = [["0", "一加一?", "1", "2", "3", "4", "B"], ["1", "零?", "0", "1", "2", "3", "A"]]
    if name == "ceval":
        header = ["id", "question", "A", "B", "C", "D", "answer"]
        write_csv(tmp_path / "val" / "high_school_physics_val.csv", [header, *rows])
        dev = [[*row, "因为"] for row in rows]
        write_csv(
            tmp_path / "dev" / "high_school_physics_dev.csv", [[*header, "explanation"], *dev]
        )
    else:
        header = ["", "Question", "A", "B", "C", "D", "Answer"]
        for split in ("test", "dev"):
            write_csv(tmp_path / split / "high_school_physics.csv", [header, *rows])
    model = FixedModel(best="BB")
    result = result_of(f"{name}={tmp_path}", model, num_examples=1)
    assert marks(result) == [("B", True), ("B", False)]
    assert model.prompts[1].text == (
        "以下是中国关于high school physics考试的单项选择题\uff0c请选出其中的正确答案。\n\n"
        "一加一?\nA. 1\nB. 2\nC. 3\nD. 4\n答案\uff1aB\n\n零?\nA. 0\nB. 1\nC. 2\nD. 3\n答案\uff1a"
    )
    assert model.continuations[0] == "A"
    texts = ["答案是B", "应该选C吧"]
    result = result_of(f"{name}={tmp_path}", FixedModel(texts=texts), scored_by=TEXT)
    assert marks(result) == [("B", True), (None, False)]


@pytest.mark.parametrize(("key", "file"), [("answer", "dev"), ("label", "val")])
def test_boolq(tmp_path: Path, key: str, file: str) -> None:
    rows = [
        {"question": "is ice cold", "title": "Ice", "passage": "Ice is cold.", key: True},
        {"question": "is fire cold", "title": "Fire", "passage": "Fire is hot.", key: False},
    ]
    write_jsonl(tmp_path / f"{file}.jsonl", rows)
    write_jsonl(tmp_path / "train.jsonl", rows[:1])
    model = FixedModel(best=["yes", "yes"])
    assert marks(result_of(f"boolq={tmp_path}", model)) == [("yes", True), ("yes", False)]
    assert model.prompts[1].text == (
        "Ice is cold.\nQuestion: is ice cold?\nAnswer: yes\n\n"
        "Fire is hot.\nQuestion: is fire cold?\nAnswer:"
    )
    model = FixedModel(texts=["Yes, it is", "perhaps"])
    result = result_of(f"boolq={tmp_path}", model, scored_by=TEXT)
    assert marks(result) == [("yes", True), (None, False)]


def test_gsm8k(tmp_path: Path) -> None:
    rows = [
        {"question": "3 and 4?", "answer": "It is 3+4=<<3+4=7>>7.\n#### 7"},
        {"question": "Money?", "answer": "Much.\n#### 1,250"},
        {"question": "Half?", "answer": "#### 0.5"},
        {"question": "None?", "answer": "#### 3"},
    ]
    write_jsonl(tmp_path / "test.jsonl", rows)
    write_jsonl(tmp_path / "train.jsonl", rows[:1])
    texts = [
        "3 + 4 = 7. The answer is 8.",
        "so $1,000 and $250: the answer is $1,250.00.\nQ: 9?\nA: The answer is 9.",
        "1, or rather 0.50",
        "no idea",
    ]
    model = FixedModel(texts=texts)
    result = result_of(f"gsm8k={tmp_path}", model)
    assert marks(result) == [("8", False), ("1250.00", True), ("0.50", True), (None, False)]
    assert result.scored_by == "text"
    assert model.prompts[1].text == (
        "Q: 3 and 4?\nA: It is 3+4=7.\nThe answer is 7.\n\nQ: Money?\nA:"
    )


def test_bbh(tmp_path: Path) -> None:
    options = {
        "input": "Which is red?\nOptions:\n(A) grass\n(B) blood",
        "target": "(B)",
    }
    free = [
        {"input": "not ( True )", "target": "False"},
        {"input": "True or False", "target": "True"},
    ]
    for name, examples in (("colored_objects", [options] * 2), ("boolean_expressions", free)):
        file = tmp_path / "bbh" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"canary": "...", "examples": examples}))
    prompt = "Evaluate it.\n\nQ: not True is\nA: Let's think.\nSo the answer is False."
    (tmp_path / "cot-prompts").mkdir()
    (tmp_path / "cot-prompts" / "boolean_expressions.txt").write_text(f"canary\n-----\n{prompt}")
    texts = ["So the answer is **False**.", "true.", "So the answer is (B).", "grass"]
    model = FixedModel(texts=texts)
    result = result_of(f"bbh={tmp_path}", model)
    assert marks(result) == [("False", True), ("true", True), ("B", True), (None, False)]
    assert model.prompts[0].text == f"{prompt}\n\nQ: not ( True )\nA:"
    assert model.prompts[2].text == f"Q: {options['input']}\nA:"


def test_agieval(tmp_path: Path) -> None:
    choice = {
        "passage": "It rained.",
        "question": "What fell?",
        "options": ["(A)rain", "(B)snow", "(C)hail", "(D)fog", "(E)dew"],
        "label": "A",
        "answer": None,
    }
    cloze = {"passage": None, "question": "Half?", "options": None, "label": None,
             "answer": "$\\frac{1}{2}$"}  # fmt: skip
    write_jsonl(tmp_path / "sat-en.jsonl", [choice, choice | {"label": ["E"]}])
    write_jsonl(tmp_path / "gaokao-mathcloze.jsonl", [cloze, cloze])
    texts = ["The answer is $\\frac{1} {2}$.", ""]
    model = FixedModel(texts=texts, best="A")
    result = result_of(f"agieval={tmp_path}", model)
    answers = [("\\frac{1} {2}", True), (None, False), ("A", True), ("A", False)]
    assert marks(result) == answers
    assert model.prompts[0].text == (
        "It rained.\nWhat fell?\n(A) rain\n(B) snow\n(C) hail\n(D) fog\n(E) dew\nAnswer:"
    )


def test_agieval_with_several_right_labels(tmp_path: Path) -> None:
    """An answer names all of them; in such a file also where one is right."""
    row = {"passage": "", "question": "Which?", "options": ["(A)a", "(B)b", "(C)c", "(D)d"]}
    labels = [["A", "C"], ["C", "A"], ["A", "C"], ["A", "C"], "B", ["B"], ["A", "B", "C", "D"]]
    write_jsonl(tmp_path / "jec-qa-kd.jsonl", [row | {"label": label} for label in labels])
    texts = ["C and A", "答案是AC。", "(A)", "A, B, C", "B", "A、B", "The answer is A, B, C, D."]
    result = result_of(f"agieval={tmp_path}", FixedModel(texts=texts))
    assert marks(result) == [
        ("A, C", True),
        ("A, C", True),
        ("A", False),
        ("A, B, C", False),
        ("B", True),
        ("A, B", False),
        ("A, B, C, D", True),
    ]
    assert [one.expected for one in result.judged[:2]] == ["A, C", "A, C"]
    assert result.scored_by == "text"
    write_jsonl(tmp_path / "jec-qa-kd.jsonl", [row | {"label": []}, row | {"label": ["A", "E"]}])
    message = message_of(f"agieval={tmp_path}")
    assert "jec-qa-kd.jsonl:1: expected labels of A, B, C, D, got []" in message
    assert "jec-qa-kd.jsonl:2: expected labels of A, B, C, D, got ['A', 'E']" in message


def message_of(*named: str, **options: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as refused:
        loaded_tasks(named, TaskOptions(**options))
    return str(refused.value)


def test_bad_rows_of_all_tasks_are_one_message(tmp_path: Path) -> None:
    mmlu, ceval, gsm8k, boolq, bbh, agi = (tmp_path / str(n) for n in range(6))
    good = ["q", "a", "b", "c", "d", "A"]
    write_csv(mmlu / "test" / "x_test.csv", [good, [*good[:5], "E"], good[:5], good])
    (mmlu / "test" / "y_test.csv").write_text("")
    write_csv(ceval / "x_val.csv", [["id", "question", "A", "B", "C", "D"], ["0", *good[:5]]])
    write_jsonl(gsm8k / "test.jsonl", [{"question": "q", "answer": "7"}, {"question": 3}])
    write_jsonl(boolq / "dev.jsonl", [{"question": "q", "passage": "p", "answer": "yes"}])
    bbh.mkdir()
    (bbh / "x.json").write_text('{"examples": 3}')
    (bbh / "y.json").write_text("{")
    (agi).mkdir()
    (agi / "x.jsonl").write_text('{"question": "q", "options": ["(A)x"], "label": "B"}\n{\n')
    named = {"mmlu": mmlu, "ceval": ceval, "gsm8k": gsm8k, "boolq": boolq, "bbh": bbh,
             "agieval": agi, "cmmlu": tmp_path / "none"}  # fmt: skip
    message = message_of(*(f"{name}={path}" for name, path in named.items()))
    for expected in (
        f"mmlu: {mmlu}/test/x_test.csv:2: expected an answer A, B, C or D, got 'E'",
        f"mmlu: {mmlu}/test/x_test.csv:3: has 5 columns; expected question, A, B, C, D, answer",
        f"mmlu: {mmlu}/test/y_test.csv has no rows",
        f"ceval: {ceval}/x_val.csv has no column answer; its test split has no answers",
        f"gsm8k: {gsm8k}/test.jsonl:1: expected an answer that ends in '#### ' and a number",
        f"gsm8k: {gsm8k}/test.jsonl:2: expected text under key 'question', got int",
        f"boolq: {boolq}/dev.jsonl:1: expected true or false under key 'answer', got 'yes'",
        f"bbh: {bbh}/x.json has no list under key 'examples'",
        f"bbh: {bbh}/y.json is not JSON",
        f"agieval: {agi}/x.jsonl:1: expected labels of A, got 'B'",
        f"agieval: {agi}/x.jsonl:2: not JSON",
        f"cmmlu: there is no file or folder {tmp_path}/none",
    ):
        assert expected in message


def test_tasks_that_cannot_be_named_are_one_message(tmp_path: Path) -> None:
    message = message_of("mlu=x", "mmlu", "boolq=x", "boolq=y", f"bbh={tmp_path}/none")
    assert "--task mlu=x: expected NAME=PATH with NAME one of agieval, bbh, boolq" in message
    assert "--task mmlu: expected NAME=PATH" in message
    assert "--task boolq is given twice" in message
    assert f"bbh: there is no file or folder {tmp_path}/none" in message
    write_mmlu(tmp_path / "mmlu")
    message = message_of(f"mmlu={tmp_path}/mmlu", num_examples=3)
    assert "mmlu: virology has 2 examples, and --shots is 3" in message
    for name in ("gsm8k", "boolq", "bbh", "ceval", "agieval"):
        assert f"{name}: {tmp_path}: no " in message_of(f"{name}={tmp_path}")
