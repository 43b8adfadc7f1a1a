"""Options by which tokens are chosen: against transformers, and what the command prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ascend_run.entrypoints.cli import run
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.text.tokenizer import train_tokenizer
from tests.support.generated import generated
from tests.support.tiny_llama import write_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

TEXT = "the quick brown fox jumps over a lazy dog while seven wizards box in vain"
PROMPTS = ["the fox", "seven", "a lazy wizard", "over and over the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = train_tokenizer([TEXT] * 4, 300)
    write_llama(path, vocab_size=tokenizer.vocab_size, eos_token_id=7)
    (path / "tokenizer.json").write_text(tokenizer.to_json())
    (path / "prompts.txt").write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    with computing_in(torch.float64):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def by_transformers(reference: Any, ids: list[int], **options: Any) -> Any:
    given = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, **options}
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    with computing_in(torch.float64), torch.no_grad():
        return reference.generate(torch.tensor([ids]), attention_mask=mask, **given)


def encoded(folder: Path, prompt: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    return ids


def test_repetition_penalty_counts_the_prompt_as_transformers(folder: Path, reference: Any) -> None:
    words = ["--max-new-tokens", 16, "--dtype", "fp64", "--repetition-penalty", 1.6]
    found = generated(folder, "--prompts", folder / "prompts.txt", *words)
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = encoded(folder, prompt)
        want = by_transformers(reference, ids, repetition_penalty=1.6)[0, len(ids) :]
        assert one["ids"] == want.tolist()


def test_beams_are_those_of_transformers(folder: Path, reference: Any) -> None:
    words = ["--max-new-tokens", 12, "--dtype", "fp64", "--num-beams", 3]
    words += ["--length-penalty", 0.5, "--early-stopping", "true"]
    found = generated(folder, "--prompts", folder / "prompts.txt", *words)
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = encoded(folder, prompt)
        options = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True}
        out = by_transformers(
            reference,
            ids,
            **options,
            max_new_tokens=12,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert one["ids"] == out.sequences[0, len(ids) :].tolist()
        assert one["score"] == pytest.approx(float(out.sequences_scores[0]), abs=1e-10)


def test_log_probabilities_are_the_transition_scores_of_transformers(
    folder: Path, reference: Any
) -> None:
    words = ["--max-new-tokens", 16, "--dtype", "fp64", "--logprobs", 3]
    words += ["--repetition-penalty", 1.6]
    (one,) = generated(folder, PROMPTS[0], *words)
    ids = encoded(folder, PROMPTS[0])
    out = by_transformers(
        reference,
        ids,
        repetition_penalty=1.6,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert one["ids"] == out.sequences[0, len(ids) :].tolist()
    want = reference.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)[0]
    got = [token["logprob"] for token in one["logprobs"]]
    assert got == pytest.approx(want.tolist(), abs=1e-10)
    for token, logits in zip(one["logprobs"], out.logits, strict=True):
        top = logits[0].log_softmax(-1).topk(3)
        assert [other["id"] for other in token["top"]] == top.indices.tolist()
        values = [other["logprob"] for other in token["top"]]
        assert values == pytest.approx(top.values.tolist(), abs=1e-10)
    assert [token["id"] for token in one["logprobs"]] == one["ids"]


def test_a_seed_repeats_its_answers_and_equal_prompts_differ(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the fox\nthe fox\nseven")
    words = ["--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 12, "--temperature", 1.5]
    first = generated(folder, *words, "--seed", 3)
    assert first == generated(folder, *words, "--seed", 3)
    assert first != generated(folder, *words, "--seed", 4)
    assert first[0]["ids"] != first[1]["ids"]
    # the first prompt alone has the draws of the first of several
    assert first[0] == generated(folder, "the fox", *words[2:], "--seed", 3)[0]


def test_a_stop_word_ends_the_text_before_it(folder: Path) -> None:
    (one,) = generated(folder, "the fox", "--max-new-tokens", 30)
    text = one["text"]
    stop = text[len(text) // 2 :][:5]  # several tokens, of one or two characters
    before = text[: text.index(stop)]
    (other,) = generated(
        folder, "the fox", "--max-new-tokens", 30, "--stop", stop, "--stop", "@@@@"
    )
    assert (other["text"], other["finish"]) == (before, "stop")
    assert other["ids"] == one["ids"][: other["new_tokens"]]
    assert other["new_tokens"] < one["new_tokens"]


def test_answers_are_printed_in_the_order_of_prompts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max-new-tokens", "9", "--top-p", "0.9", "--seed", "11"]
    found = generated(folder, "--prompts", folder / "prompts.txt", *words)
    capsys.readouterr()
    assert run(["generate", str(folder), "--prompts", str(folder / "prompts.txt"), *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{one['prompt']}{one['text']}\n" for one in found)
    assert printed.err.endswith("s, seed 11\n")


def test_pieces_are_printed_as_they_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from ascend_run.tools.generate import session

    events: list[str] = []
    echo, step = click.echo, session.Session.step

    def noted(text: str = "", **options: Any) -> None:
        events.append(text)
        echo(text, **options)

    def stepped(self: Any) -> Any:
        events.append("STEP")
        return step(self)

    monkeypatch.setattr(click, "echo", noted)
    monkeypatch.setattr(session.Session, "step", stepped)
    assert run(["generate", str(folder), "the fox", "--max-new-tokens", "5"]) == 0
    assert events[:2] == ["STEP", events[1]]
    assert events[1].startswith("the fox")
    assert events.count("STEP") == 5
    assert events[2:10:2] == ["STEP"] * 4


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["--temperature", "-1", "--top-p", "1.5", "--stop", "", "--logprobs", "2"],
            [
                "--temperature -1.0: expected a number at least 0",
                "--top-p 1.5: expected a number from 0 to 1",
                "--stop '': expected at least one character",
                "--logprobs: no effect without --json",
            ],
        ),
        (["--seed", "3"], ["--seed: no effect without draws; say --temperature above 0"]),
        (
            ["--temperature", "0", "--top-k", "4", "--min-p", "0.1"],
            ["--top-k, --min-p: no effect without draws"],
        ),
        (["--repetition-penalty", "nan"], ["--repetition-penalty nan: expected a number above 0"]),
        (
            ["--num-beams", "0", "--length-penalty", "inf"],
            [
                "--num-beams 0: expected a number from 1 to 64",
                "--length-penalty inf: expected a finite number",
            ],
        ),
        (
            ["--length-penalty", "2", "--early-stopping", "true"],
            ["--length-penalty, --early-stopping: no effect with one beam; say --num-beams"],
        ),
        (
            ["--num-beams", "2", "--top-k", "3", "--stop", "x", "--logprobs", "1", "--json"],
            ["--top-p and --min-p; --stop; --logprobs: not with --num-beams"],
        ),
        (["--num-beams", "2", "--tp", "2"], ["--num-beams 2 on 2 ranks: a search is on one rank"]),
        (["--top-k", "many"], ["'many' is not a valid integer"]),
    ],
    ids=["ranges", "seed", "greedy", "nan", "beams", "one-beam", "both", "ranks", "word"],
)
def test_options_that_cannot_be_used_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], messages: list[str]
) -> None:
    assert run(["generate", str(folder), "fox", *words]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert "Traceback" not in error


def test_without_a_seed_a_new_one_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folder), "fox", "--max-new-tokens", "8", "--temperature", "2"]
    assert run([*words, "--json"]) == 0
    printed = capsys.readouterr()
    seed = printed.err.split()[-1]
    assert run([*words, "--json", "--seed", seed]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(printed.out)
