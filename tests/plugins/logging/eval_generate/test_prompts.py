"""Prompts that cannot be continued are refused before anything starts, all in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import AscendRunError, StorageError
from ascend_run.plugins.logging.eval_generate import EvalGenerateConfig
from ascend_run.plugins.logging.eval_generate.sample_file import SampleFile
from ascend_run.testing.models import DENSE
from tests.support.generated import write_words
from tests.support.small_runs import prepare

OPTION = "plugins.eval-generate"


def problems_of(values: Mapping[str, Any]) -> Sequence[str]:
    with pytest.raises(AscendRunError) as refusal:
        prepare({**DENSE, **values}, ["eval-generate"])
    return [problem for problem in refusal.value.problems if problem.startswith("eval-generate: ")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "there is no prompt to continue; give texts with plugins.eval-generate.prompts"),
        ({"prompts": ["a"]}, "there are texts to continue and no data.tokenizer to encode them"),
        ({"prompts_file": "{folder}/none"}, "none cannot be read: No such file or directory"),
        ({"prompts_file": "{folder}/empty"}, "empty has no line; write a text to continue on each"),
        ({"prompt_ids": [[]]}, "prompt 1 is empty, and the tokenizer adds no token"),
        ({"prompt_ids": [[1] * 16]}, "prompt 1 has 16 tokens, and the model's longest text has 16"),
        ({"prompt_ids": [[1], [3, 90]]}, "prompt 2 has the token id 90, and the model's vocabular"),
        ({"prompt_ids": [[-1]]}, "prompt 1 has the token id -1, and the model's vocabulary has 90"),
    ],
    ids=["none", "no tokenizer", "no file", "no line", "empty", "long", "vocabulary", "negative"],
)
def test_each_problem_is_one_message(
    tmp_path: Path, values: Mapping[str, Any], message: str
) -> None:
    (tmp_path / "empty").touch()
    given = {
        f"{OPTION}.{name}": value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in values.items()
    }
    (problem,) = problems_of(given)
    assert message in problem


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """Of a model that scores, of ids and of texts; ids of the tokenizer are checked too."""
    found = problems_of(
        {
            "model.num_labels": 1,
            "data.tokenizer": str(write_words(tmp_path, 100)),
            f"{OPTION}.prompts": ["w95", ""],
            f"{OPTION}.prompt_ids": [[1] * 20],
        }
    )
    said = ("id 95", "prompt 2 is empty", "20 tokens", "model.num_labels=1 gives the model a score")
    assert len(found) == 4
    assert all(text in problem for text, problem in zip(said, found, strict=True))
    (unread,) = problems_of({"data.tokenizer": str(tmp_path / "x"), f"{OPTION}.prompts": ["a"]})
    assert "x does not exist" in unread


def test_options_out_of_range_are_refused() -> None:
    for field in attrs.fields(EvalGenerateConfig):
        if field.name in ("interval", "max_new_tokens", "temperature", "top_k", "top_p", "seed"):
            with pytest.raises(ValueError, match=field.name):
                EvalGenerateConfig(**{field.name: -1})


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    file = SampleFile()
    file.add(1, [])
    file.write(tmp_path)  # there is nothing to write
    with pytest.raises(StorageError, match="eval-generate: cannot write"):
        file.forget_after(0, tmp_path)
