"""A model whose answers are given, and files of benchmarks in their public formats."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ascend_run.tools.evaluate.asking import TaskOptions
from ascend_run.tools.evaluate.judging import loaded_tasks, task_result
from ascend_run.tools.evaluate.prompts import Prompt
from ascend_run.tools.evaluate.results import TaskResult


@attrs.define
class FixedModel:
    """An ``AnsweringModel``; a prompt's length is that of its text."""

    texts: Sequence[str] = ()
    best: Sequence[str] = ()  #: The label that each question's prompt makes most probable.
    max_length: int = 10**9
    prompts: list[Prompt] = attrs.field(factory=list)
    stop: Sequence[str] = ()
    sampling: object = None
    continuations: list[str] = attrs.field(factory=list)

    def fits(self, prompt: Prompt, num_new: int) -> bool:
        return len(prompt.shown) + num_new <= self.max_length

    def answers(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: object = None,
    ) -> Iterator[str]:
        self.prompts += prompts
        self.stop, self.sampling = stop, sampling
        yield from self.texts

    def log_probabilities(self, pairs: Sequence[tuple[Prompt, str]]) -> Iterator[float]:
        shown = [*dict.fromkeys(prompt for prompt, _ in pairs)]
        self.prompts += shown
        for prompt, text in pairs:
            self.continuations.append(text)
            yield -1.0 if text.strip() == self.best[shown.index(prompt)] else -2.0


def result_of(named: str, model: FixedModel, **options: Any) -> TaskResult:
    asking = TaskOptions(**options)
    (loaded,) = loaded_tasks([named], asking)
    steps: list[tuple[str, int, int]] = []
    result = task_result(loaded, model, asking, lambda *step: steps.append(step))
    assert steps[-1][1:] == (len(result.judged),) * 2
    return result


def marks(result: TaskResult) -> list[tuple[str | None, bool]]:
    return [(one.answer, one.correct) for one in result.judged]


def write_csv(path: Path, rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


def write_jsonl(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


WriteMmlu = Callable[[Path], Path]


def write_mmlu(folder: Path, *, num_dev: int = 2) -> Path:
    """Two subjects with three questions and one."""
    rows = [
        ["What has two lines,\nand a comma?", "one", "two", "three", "four", "B"],
        ["2 + 2?", "1", "2", "3", "4", "D"],
        ["0?", "0", "1", "2", "3", "A"],
    ]
    dev = [[f"example {n}?", "w", "x", "y", "z", "ABCD"[n]] for n in range(num_dev)]
    write_csv(folder / "test" / "abstract_algebra_test.csv", rows)
    write_csv(folder / "test" / "virology_test.csv", [["v?", "a", "b", "c", "d", "C"]])
    for name in ("abstract_algebra", "virology"):
        write_csv(folder / "dev" / f"{name}_dev.csv", dev)
    return folder
