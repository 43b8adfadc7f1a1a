"""A run on text is the run on its token files: losses, weights, resuming, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import DataError, Layout, NoCache, RunConfig
from ascend_run.plugins.tasks.pretrain import Pretrain, PretrainConfig
from ascend_run.plugins.tasks.pretrain.sources import read_sources
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.preprocess.options import PreprocessOptions
from ascend_run.tools.preprocess.writing import preprocess
from ascend_run.tools.report.page import write_report
from ascend_run.types.config import DataSection
from tests.core.train.runs import HALF, STEPS, Runs, assert_same
from tests.support.tiny_configs import model_fields, parallel_fields

VOCABULARY = 300
TEXTS = [f"text {n} " + "of some words, " * (n % 9) for n in range(120)]


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Two sources and a held-out one, and the tokenizer beside them."""
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, VOCABULARY).to_json())
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:70]))
    (tmp_path / "array.json").write_text(json.dumps([*rows[70:], rows[71]]))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[::2]):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{text} held out")
    return [tmp_path / "lines.jsonl", tmp_path / "array.json", tmp_path / "texts"]


def test_a_run_on_text_is_the_run_on_its_token_files(
    gloo_pool: GlooPool, tmp_path: Path, sources: list[Path]
) -> None:
    kind = {**DENSE, "model.vocab_size": VOCABULARY, "train.micro_batch_size": 1}
    runs = Runs(gloo_pool, tmp_path, (kind, 1, ()))
    runs.data |= {
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "data.train_weights": [3.0, 1.0],
        "data.eod_mask_loss": True,
    }

    def use(*names: Path) -> None:
        runs.data |= {"data.train": [*map(str, names[:2])], "data.validation": [str(names[2])]}

    prefixes = [source.with_name(f"{source.stem}-tokens") for source in sources]
    for source, prefix in zip(sources, prefixes, strict=True):
        tokenizer = tmp_path / "tokenizer.json"
        preprocess(PreprocessOptions(inputs=(source,), output_prefix=prefix, tokenizer=tokenizer))
    use(*prefixes)
    wanted = runs("tokens", train__eval_interval=HALF)
    use(*sources)
    runs("text", train__eval_interval=HALF, train__train_iters=HALF,
         checkpoint__save_interval=HALF)  # fmt: skip
    resumed = runs("text", train__eval_interval=HALF, checkpoint__save_interval=HALF)
    assert len(wanted[0].readings) == STEPS + STEPS // HALF + 1
    assert resumed[0].readings == wanted[0].readings
    assert_same(resumed, wanted)
    assert blend_rows(tmp_path / "text", sources) == blend_rows(tmp_path / "tokens", prefixes)


def blend_rows(run: Path, names: list[Path]) -> list[dict[str, Any]]:
    """Return the report's rows of a blend without the names, which are checked here."""
    (summary,) = write_report([read_run(run)], run / "page.html")
    rows = [attrs.asdict(row) for row in summary.blend]
    assert [row.pop("name") for row in rows] == [*map(str, names[:2])]
    assert all(row["epochs"] for row in rows)
    return rows


def problems(options: PretrainConfig | None = None, **data: Any) -> list[str]:
    config = RunConfig(model=model_fields(), parallel=parallel_fields(), data=DataSection(**data))
    hooks = Hooks([Pretrain(options or PretrainConfig())])
    found = hooks.contributions("ascend_check", config=config, layout=Layout())
    return [problem for _, each in found for problem in each]


def test_bad_rows_of_all_sources_are_named_with_their_files(
    tmp_path: Path, sources: list[Path]
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n{"text"\n{"body": "b"}\n')
    (tmp_path / "array.json").write_text('[{"text": "a"}, 3]')
    tokenizer = str(tmp_path / "tokenizer.json")
    names = tuple(map(str, sources))
    found = problems(train=names[:2], validation=names[2:], tokenizer=tokenizer)
    expected = [
        f"pretrain: {names[0]}:2: not a JSON object on one line",
        f"pretrain: {names[0]}:3: expected text under key 'text', got nothing; its keys: 'body'; ",
        f"pretrain: {names[1]}:2: expected a JSON object, found int",
    ]
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))
    assert found[1].endswith('; choose with plugins.pretrain.map_keys=["text=KEY"]')
    mapped = PretrainConfig(map_keys=("text=body",))
    (tmp_path / "lines.jsonl").write_text('{"body": "b"}\n')
    assert problems(mapped, train=names[:1], tokenizer=tokenizer) == []


def test_rows_after_the_first_are_checked_where_all_are_read(
    tmp_path: Path, sources: list[Path]
) -> None:
    """Each with its file and row, of all sources in one message, as the check has them."""
    bad, good = '{"body": "b"}\n', "".join(f'{{"text": "text {n}"}}\n' for n in range(200))
    for source in sources[:2]:
        source.with_suffix(".jsonl").write_text(f"{good}{bad}{good}{bad}")
    names = tuple(str(source.with_suffix(".jsonl")) for source in sources[:2])
    data = {"train": names, "tokenizer": str(tmp_path / "tokenizer.json")}
    assert problems(**data) == []
    config = RunConfig(model=model_fields(), parallel=parallel_fields(), data=DataSection(**data))
    with pytest.raises(DataError) as refusal:
        read_sources(config, PretrainConfig(), NoCache())
    where = [
        problem.partition(" expected text under key 'text'")[0]
        for problem in refusal.value.problems
    ]
    assert where == [f"pretrain: {name}:{row}:" for name in names for row in (201, 402)]
    Path(names[0]).write_text(f"{bad}{good}")
    (first,) = problems(**data)
    assert refusal.value.problems[0] == first.replace(":1: ", ":201: ")


def test_a_check_of_token_files_imports_no_reader_of_text(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from ascend_run.plugin_api import RunConfig\n"
        "from ascend_run.plugins.tasks.pretrain import Pretrain, PretrainConfig\n"
        "from ascend_run.types.config import DataSection\n"
        "from tests.support.tiny_configs import model_fields, parallel_fields\n"
        "config = RunConfig(model=model_fields(), parallel=parallel_fields(),\n"
        "                   data=DataSection(train=(sys.argv[1],)))\n"
        "assert len(Pretrain(PretrainConfig()).ascend_check(config)) == int(sys.argv[2])\n"
        "print('ascend_run.text.document_files' in sys.modules)"
    )
    (tmp_path / "a.txt").write_text("text")
    for name, count, imported in (("a", "0", "False"), ("a.txt", "1", "True")):
        words = [sys.executable, "-c", program, str(tmp_path / name), count]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == imported


def test_options_that_text_needs_are_named(tmp_path: Path, sources: list[Path]) -> None:
    train, tokenizer = (str(sources[0]),), str(tmp_path / "tokenizer.json")
    (problem,) = problems(train=train)
    assert problem.startswith("pretrain: data.tokenizer is none, and text is encoded with it; ")
    (problem,) = problems(PretrainConfig(end_token="</doc>"), train=train, tokenizer=tokenizer)
    assert problem.endswith("has no token '</doc>' to end a document with")
    (problem,) = problems(PretrainConfig(map_keys=("body=b",)), train=train, tokenizer=tokenizer)
    assert problem.startswith("pretrain: 'body' is no key of the handler 'text'")
    (tmp_path / "a.log").touch()
    (problem,) = problems(train=(str(tmp_path / "a.log"),), tokenizer=tokenizer)
    assert "unknown suffix '.log'; set plugins.pretrain.format=jsonl|records|" in problem
