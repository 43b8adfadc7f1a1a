"""Perplexity against the loss of ``pretrain`` and against transformers; data and messages."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import Batch, NoCache
from ascend_run.plugins.tasks.shared.fields import TOKEN_FIELDS
from ascend_run.plugins.tasks.shared.losses import next_token_loss
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.text.indexed import read_index
from ascend_run.text.tokenizer import load_tokenizer
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.evaluate.perplexity import windows
from ascend_run.tools.evaluate.row_scores import Row, row_scores
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from tests.support.token_files import WriteDataset
from tests.tools.evaluate.conftest import TEXT, WORDS

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

LENGTH, SAMPLES = 24, 5
Evaluate = Callable[..., Any]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    torch.manual_seed(4)
    return torch.randint(290, (LENGTH * SAMPLES + 1,)).tolist()


@pytest.fixture(scope="module")
def logits_of(folder: Path) -> Callable[[list[int]], Tensor]:
    """Return transformers' logits [S, V]."""
    with computing_in(torch.float64):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def compute(ids: list[int]) -> Tensor:
        with computing_in(torch.float64), torch.no_grad():
            logits: Tensor = model(torch.tensor([ids])).logits[0]
        return logits

    return compute


@pytest.fixture
def model(folder: Path) -> Iterator[GenerationModel]:
    with loaded_model(folder, SourceOptions(), torch.float64) as loaded:
        yield loaded


def test_loss_is_that_of_an_evaluation_of_pretrain(
    folder: Path, ids: list[int], write_dataset: WriteDataset, evaluate: Evaluate
) -> None:
    from ascend_run.plugins.tasks.pretrain.epochs import EpochSettings, TokenStream  # Megatron

    prefix = write_dataset([ids], vocab_size=300)
    (found,) = evaluate(folder, prefix, "--window", LENGTH)["perplexity"]
    settings = EpochSettings(seq_length=LENGTH, seed=3)
    samples = TokenStream(prefix, _Documents(prefix), settings, NoCache(), SAMPLES)
    with loaded_model(folder, SourceOptions(), torch.float64) as model:
        sums = [
            next_token_loss(model._stage.chunk, _batch(samples[number]))
            for number in range(SAMPLES)
        ]
    loss = sum(float(one.sum) for one in sums) / sum(int(one.count) for one in sums)
    assert found["tokens"] == LENGTH * SAMPLES
    assert abs(found["loss"] - loss) < 1e-10
    assert found["perplexity"] == math.exp(found["loss"])


def _batch(sample: Mapping[str, Tensor]) -> Batch:
    tensors = {name: tensor[None] for name, tensor in sample.items()}
    return Batch(tensors=tensors, fields=TOKEN_FIELDS)


class _Documents:
    """The token files of a prefix, as one document."""

    def __init__(self, prefix: str) -> None:
        index = read_index(prefix)
        self._ids, self.sequence_lengths = index.ids(), index.lengths

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        return self._ids[offset:][:length]


@pytest.mark.parametrize(("window", "stride"), [(None, None), (50, 30)], ids=str)
def test_loss_is_that_of_logits_of_transformers(
    folder: Path,
    ids: list[int],
    write_dataset: WriteDataset,
    evaluate: Evaluate,
    logits_of: Callable[[list[int]], Tensor],
    window: int | None,
    stride: int | None,
) -> None:
    """Each token is predicted once, in the first window that has it."""
    prefix = write_dataset([ids[:70], ids[70:]], vocab_size=300)
    options = [f"--{k}={v}" for k, v in (("window", window), ("stride", stride)) if v]
    (found,) = evaluate(folder, prefix, *options)["perplexity"]
    window, stride = window or 128, stride or window or 128
    losses: dict[int, float] = {}
    for begin in range(0, len(ids) - 1, stride):
        row = ids[begin : begin + window + 1]
        if len(row) < 2:
            break
        each = F.cross_entropy(logits_of(row[:-1]), torch.tensor(row[1:]), reduction="none")
        for at, loss in enumerate(each.tolist(), start=begin + 1):
            losses.setdefault(at, loss)
    assert sorted(losses) == [*range(1, len(ids))]
    assert (found["tokens"], found["documents"]) == (len(ids) - 1, 2)
    assert abs(found["loss"] - sum(losses.values()) / len(losses)) < 1e-10


@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_rows_in_chunks_have_the_scores_of_whole_rows(
    model: GenerationModel,
    ids: list[int],
    logits_of: Callable[[list[int]], Tensor],
    chunk_tokens: int,
) -> None:
    lengths = [(2, 1), (31, 30), (9, 2), (100, 5)]
    rows = [Row(ids=ids[n : n + length], num_scored=k) for n, (length, k) in enumerate(lengths)]
    got = [*row_scores(model, rows, chunk_tokens)]
    for row, scores in zip(rows, got, strict=True):
        logits = logits_of([*row.ids][:-1]).log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(row.ids[1:])[:, None])[-row.num_scored :, 0]
        torch.testing.assert_close(scores.log_probabilities, wanted, rtol=0, atol=1e-10)
        greedy = logits[-row.num_scored :].argmax(-1).tolist() == row.ids[-row.num_scored :]
        assert scores.greedy == greedy


@pytest.mark.parametrize("tokens", [2, 9, 10, 11, 12, 35])
@pytest.mark.parametrize(("window", "stride"), [(10, 10), (10, 3), (10, 1)])
def test_windows_score_each_id_once(tokens: int, window: int, stride: int) -> None:
    seen: list[int] = []
    for row in windows([*range(tokens)], window, stride):
        assert row.num_inputs <= window
        seen += row.ids[-row.num_scored :]
    assert seen == [*range(1, tokens)]


def test_text_has_the_tokens_that_pretrain_reads(
    folder: Path, tmp_path: Path, evaluate: Evaluate
) -> None:
    """Whatever the format; a special token that a text spells is text."""
    texts = ["the <|endoftext|> fox", "a lazy dog"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate((*texts, texts[0], " ")):  # a duplicate, and nothing
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    encoder = load_tokenizer(folder / "tokenizer.json").encoder
    num_tokens = sum(len(each) for each in encoder.encode(texts))
    names = [tmp_path / "rows.jsonl", tmp_path / "texts"]
    (tmp_path / "texts" / "rows").write_text("no known suffix")
    first = evaluate(folder, names[0], "--json-key", "body")["perplexity"]
    second = evaluate(folder, names[1])["perplexity"]
    for (one,), name in zip((first, second), names, strict=True):
        assert (one["name"], one["documents"], one["tokens"]) == (str(name), 2, num_tokens + 1)
    assert first[0]["loss"] == second[0]["loss"]
    (without,) = evaluate(folder, names[1], "--no-append-eod")["perplexity"]
    assert without["tokens"] == num_tokens - 1


def test_several_files_are_rows_of_one_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(TEXT if file is files[0] else WORDS[3])
    assert run(["evaluate", str(folder), *map(str, files)]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["file", "documents", "tokens", "loss", "perplexity"]
    assert [row.split()[0] for row in rows] == [*map(str, files)]
    for row in rows:
        loss, perplexity = map(float, row.split()[-2:])
        assert abs(math.exp(loss) / perplexity - 1) < 1e-3


def test_data_that_cannot_be_read_is_one_message(
    folder: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.txt"
    bad.write_text('{"text": "a"}\n{"text"\n{"body": "b"}\n')
    empty.write_text("")
    message = refused(folder, bad, tmp_path / "none", empty, tmp_path / "x.bin")
    for part in (
        f"{bad}:2: not a JSON object on one line",
        f"{bad}:3: expected text under key 'text', got nothing; its keys: 'body'",
        "; choose with --json-key",
        f"{tmp_path}/none: no such file or folder, and no token files of this prefix",
        f"no documents in {empty}: 1 were empty",
        f"a dataset is named by its prefix: {tmp_path}/x",
    ):
        assert part in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "129"], "--window 129: the model's longest text has 128 tokens"),
        (["--window", "9", "--stride", "10"], "--stride 10: expected at most the window, 9"),
        (["--window", "0"], "window"),
        (["--tokenizer", "/none"], "no tokenizer found; name one with --tokenizer"),
        (["--step", "3"], "--step and --config do not go with a Hugging Face folder"),
    ],
    ids=["window", "stride", "zero", "tokenizer", "step"],
)
def test_options_that_cannot_be_used_are_one_message(
    folder: Path, tmp_path: Path, refused: Callable[..., str], options: list[str], message: str
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    assert message in refused(folder, tmp_path / "a.txt", *options)


def test_token_files_of_another_vocabulary_are_refused(
    folder: Path, write_dataset: WriteDataset, refused: Callable[..., str]
) -> None:
    names = [write_dataset([[1, n]], name=str(n), vocab_size=500) for n in (350, 297, 298)]
    message = refused(folder, *names)
    assert f"{names[0]} has the token id 350, and the model's vocabulary has 298 ids" in message
    assert f"{names[2]} has the token id 298" in message
    assert f"{names[1]} has" not in message
    one = write_dataset([[1]], name="one")
    assert f"{one} has 1 tokens; a perplexity needs two" in refused(folder, one)
