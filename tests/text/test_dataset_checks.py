"""Bad data are refused before a run, all of them in one message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from ascend_run.plugin_api import DataError, RunConfig
from ascend_run.text import dataset_checks
from ascend_run.text.dataset_checks import check_data, check_dataset
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.tools.preprocess.options import PreprocessOptions
from ascend_run.tools.preprocess.report import PreprocessReport
from ascend_run.tools.preprocess.writing import preprocess
from tests.support.token_files import WriteDataset

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def made(tmp_path: Path) -> PreprocessReport:
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number}.txt").write_text(f"document number {number} of a few")
    return preprocess(
        PreprocessOptions(
            inputs=(tmp_path / "in",),
            output_prefix=tmp_path / "train",
            train_vocab_size=280,
            holdout=0.3,
        )
    )


def test_valid_data_agree_on_vocabulary_and_end_of_document(
    made: PreprocessReport, run_config: MakeConfig
) -> None:
    assert made.heldout is not None
    for tokenizer in (made.tokenizer, None):
        config = run_config(
            vocab_size=280,
            train=(made.train.prefix,),
            validation=(made.heldout.prefix,),
            tokenizer=tokenizer,
            eod_mask_loss=True,
        )
        with capture_logs() as events:
            facts = check_data(config)
        assert events == []
        assert (facts.vocab_size, facts.eod) == (made.vocab_size, 0)
        assert facts.tokenizer_sha256 == made.tokenizer_sha256
        assert facts.datasets[made.train.prefix].tokens == made.train.tokens


def test_another_tokenizer_is_refused_with_both_fingerprints(
    made: PreprocessReport, tmp_path: Path, run_config: MakeConfig
) -> None:
    values = json.loads(Path(made.tokenizer).read_text())
    first, second = list(values["model"]["vocab"].items())[5:7]
    values["model"]["vocab"] |= {first[0]: second[1], second[0]: first[1]}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    with pytest.raises(DataError) as refusal:
        check_data(run_config(vocab_size=280, train=(made.train.prefix,), tokenizer=str(other)))
    (problem,) = refusal.value.problems
    assert problem.startswith(f"{made.train.prefix}.json: made with tokenizer")
    assert made.tokenizer_sha256[:12] in problem


def test_datasets_of_different_tokenizers_are_refused_without_a_named_one(
    made: PreprocessReport, tmp_path: Path, run_config: MakeConfig
) -> None:
    other = preprocess(
        PreprocessOptions(
            inputs=(tmp_path / "in",),
            output_prefix=tmp_path / "other",
            tokenizer_out=tmp_path / "other-tokenizer.json",
            train_vocab_size=270,
        )
    )
    with pytest.raises(DataError, match="different tokenizers"):
        check_data(run_config(vocab_size=280, train=(made.train.prefix, other.train.prefix)))


def test_every_problem_of_a_run_stands_in_one_message(
    made: PreprocessReport, tmp_path: Path, run_config: MakeConfig
) -> None:
    idx_path(made.train.prefix).write_bytes(b"MMIDIDX")
    config = run_config(
        vocab_size=100,
        train=(made.train.prefix, str(tmp_path / "none")),
        tokenizer=str(tmp_path / "absent.json"),
        eod_mask_loss=True,
    )
    with pytest.raises(DataError) as refusal:
        check_data(config)
    text = "\n".join(refusal.value.problems)
    for part in ("absent.json does not exist", "train.idx", "none.bin", "data.eod_mask_loss"):
        assert part in text
    assert refusal.value.exit_code == 2


def test_a_model_with_too_few_rows_is_refused_with_the_number_that_works(
    made: PreprocessReport, run_config: MakeConfig
) -> None:
    with pytest.raises(DataError, match=f"set model.vocab_size={made.vocab_size}"):
        check_data(run_config(vocab_size=100, train=(made.train.prefix,), tokenizer=made.tokenizer))


def test_a_changed_byte_of_either_file_is_found_by_its_record(made: PreprocessReport) -> None:
    for path in (bin_path(made.train.prefix), idx_path(made.train.prefix)):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="corrupt") as refusal:
            check_dataset(made.train.prefix)
        assert str(path) in str(refusal.value)
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    check_dataset(made.train.prefix)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("vocab_size"),
        lambda values: values.update(tokens="many"),
        lambda values: values.update(format="something else"),
        lambda values: values.update(format_version=2),
        lambda values: values.update(bin=7),
        lambda values: values.update(unknown=1),
    ],
)
def test_a_record_that_is_not_ours_is_refused(
    made: PreprocessReport, change: Callable[[dict[str, Any]], None]
) -> None:
    path = Path(f"{made.train.prefix}.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="is not the record of a token dataset"):
        check_dataset(made.train.prefix)


def test_a_dataset_without_a_record_is_allowed_with_a_warning(write_dataset: WriteDataset) -> None:
    prefix = write_dataset([[1, 2], [99]])
    with capture_logs() as events:
        facts = check_dataset(prefix, "0" * 64, 100)
    assert facts.sidecar is None
    assert [(event["event"], event["log_level"], event["dataset"]) for event in events] == [
        ("dataset.without_record", "warning", prefix)
    ]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("token", "vocab_size"), [(99, 99), (70_000, 65_500), (-5, 70_000)])
def test_token_ids_outside_the_vocabulary_are_refused(
    write_dataset: WriteDataset,
    monkeypatch: pytest.MonkeyPatch,
    token: int,
    vocab_size: int,
    whole: bool,
) -> None:
    documents = [[1] * 40, [token] * 40]
    if not whole:
        monkeypatch.setattr(dataset_checks, "WHOLE_CHECK_BYTES", 8)
        monkeypatch.setattr(dataset_checks, "_WINDOW_TOKENS", 4)
    prefix = write_dataset(documents, vocab_size=vocab_size)
    with pytest.raises(DataError, match=rf"token id {token}, expected ids from 0 to"):
        check_dataset(prefix, None, vocab_size)
    check_dataset(write_dataset([[1] * 80], "good"), None, vocab_size)


def test_a_dataset_without_tokens_is_refused(write_dataset: WriteDataset) -> None:
    for documents in ([], [[]]):
        with pytest.raises(DataError, match="holds no tokens"):
            check_dataset(write_dataset(documents))


def test_the_windows_of_a_large_file_reach_both_its_ends(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_checks, "WHOLE_CHECK_BYTES", 8)
    monkeypatch.setattr(dataset_checks, "_WINDOW_TOKENS", 4)
    for place in (0, -1):
        tokens = np.ones(10_000, dtype=np.int64)
        tokens[place] = 99
        with pytest.raises(DataError, match="token id 99"):
            check_dataset(write_dataset([tokens.tolist()]), None, 99)


def test_checking_and_preprocessing_import_no_torch() -> None:
    program = (
        "import sys\n"
        "import ascend_run.text.dataset_checks, ascend_run.tools.preprocess.writing\n"
        "import ascend_run.core.data.index_cache, ascend_run.tools.preprocess.command\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
