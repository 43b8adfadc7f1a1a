"""What is trained of a conversation: prompts, the last turn, turns by weights. Ids and masks are
those of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ascend_run.plugin_api import ConfigError, DataError, NoCache
from ascend_run.text.encoder import Encoder
from ascend_run.text.encoding import Encoded, LengthLimit, encoded_dataset, encoded_files
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.packed_samples import PackedSamples
from ascend_run.text.reading import sample_reader
from ascend_run.text.sample_files import check_sample_dataset
from ascend_run.text.samples import Conversation
from ascend_run.tools.preprocess.samples import SampleOptions, preprocess_samples
from tests.support.chats import CHATML, GENERATION, LAST_TURN_THINKS, write_lines, write_tokenizer

TEMPLATES = {"chatml": CHATML, "generation": GENERATION}
NO_LIMIT = LengthLimit(max_tokens=10_000, too_long="drop")
TURNS = ["three four, and then five", "six seven", "hello"]


def record(*weights: Any, texts: list[str] = TURNS) -> dict[str, Any]:
    """Return a conversation whose turns have these weights; None leaves the weight out."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "The fox says hello."}]
    for text, weight in zip(texts, weights or (None,) * len(texts), strict=True):
        messages.append({"role": "user", "content": "one two?"})
        more = {} if weight is None else {"weight": weight}
        messages.append({"role": "assistant", "content": text, **more})
    return {"messages": messages}


def plain(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: m[k] for k in ("role", "content")} for m in conversation["messages"]]


def encoder(folder: Path, template: str, **options: bool) -> Encoder:
    tokenizer, chat = open_chat(
        ChatOptions(
            tokenizer=write_tokenizer(folder / "tokenizer", template),
            tokenizer_option="data.tokenizer",
            template_option="plugins.sft.template",
            date_option="plugins.sft.date",
        )
    )
    return Encoder(tokenizer=tokenizer, template=chat, keeps_special=False, **options)


def encode(folder: Path, template: str, records: list[Any], **options: bool) -> Encoded:
    path = Path(write_lines(folder / "a.jsonl", records))
    reader = sample_reader("chat", (), Conversation)
    return encoded_files([path], reader, encoder(folder, template, **options), NO_LIMIT, NoCache())


def of_transformers(folder: Path, conversation: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return ids and assistant mask."""
    write_tokenizer(folder / "blocks", GENERATION)
    made = AutoTokenizer.from_pretrained(folder / "blocks").apply_chat_template(
        plain(conversation), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


def runs(mask: list[int]) -> list[range]:
    """Return the runs of ones, one a turn."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [range(*pair) for pair in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_inputs_are_trained_as_transformers_tokenizes_them(tmp_path: Path, template: str) -> None:
    encoded = encode(tmp_path, TEMPLATES[template], [record()], train_on_inputs=True)
    ids, _ = of_transformers(tmp_path, record())
    assert encoded.ids.tolist() == ids
    assert encoded.trained.dtype == np.bool_
    assert encoded.trained.all()


@pytest.mark.parametrize("template", TEMPLATES)
def test_without_history_the_last_turn_is_trained(tmp_path: Path, template: str) -> None:
    encoded = encode(tmp_path, TEMPLATES[template], [record()], mask_history=True)
    ids, mask = of_transformers(tmp_path, record())
    last = runs(mask)[-1]
    assert encoded.ids.tolist() == ids[: last.stop]
    assert np.flatnonzero(encoded.trained).tolist() == [*last]


def test_an_empty_last_answer_trains_nothing_without_history(tmp_path: Path) -> None:
    empty = record(texts=["three", "four", ""])
    with pytest.raises(DataError, match="none of 1 conversations") as error:
        encode(tmp_path, CHATML, [empty], mask_history=True)
    assert "nothing to train on" in error.value.problems[0]


WEIGHTS: dict[str, tuple[Any, ...]] = {
    "0 and 1": (1, 0, 1),
    "the last is 0": (1, 1, 0),
    "fractions": (0.25, 2, 0.5),
    "one is missing": (None, 0.5, 1),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_turn_has_its_weight(
    tmp_path: Path, template: str, inputs: bool, weights: str
) -> None:
    given = WEIGHTS[weights]
    encoded = encode(tmp_path, TEMPLATES[template], [record(*given)], train_on_inputs=inputs)
    ids, mask = of_transformers(tmp_path, record(*given))
    wanted = [float(inputs)] * len(ids)
    for run, weight in zip(runs(mask), given, strict=True):
        wanted[run.start : run.stop] = [1.0 if weight is None else float(weight)] * len(run)
    last = max(index for index, weight in enumerate(wanted) if weight) + 1
    assert encoded.ids.tolist() == ids[:last]
    assert encoded.trained.tolist() == wanted[:last]
    is_whole = {*given} <= {0, 1, None}
    assert encoded.trained.dtype == (np.bool_ if is_whole else np.float32)


def test_weights_are_the_loss_mask_of_samples(tmp_path: Path) -> None:
    records = [record(0.25, 2, 0.5), record(), record(1, 0, 1)]
    encoded = encode(tmp_path, CHATML, records)
    assert encoded.as_arrays()["trained"].dtype == np.float32
    again = Encoded.from_arrays(encoded.as_arrays())
    packed = PackedSamples(again, length=600, pad_id=0, num_samples=1, seed=None, packs=True)
    mask = packed[0].loss_mask
    values, counts = np.unique(mask[mask > 0], return_counts=True)
    assert values.tolist() == [0.25, 0.5, 1.0, 2.0]
    assert counts.sum() == np.count_nonzero(encoded.trained)


def test_a_turn_that_the_template_tells_by_a_marker_has_its_weight(tmp_path: Path) -> None:
    encoded = encode(tmp_path, LAST_TURN_THINKS, [record(0.5, 0, 2)])
    assert set(encoded.trained.tolist()) == {0.0, 0.5, 2.0}


def test_an_empty_turn_shifts_no_weight(tmp_path: Path) -> None:
    texts = ["three", "", "four five"]
    first, last = (
        encode(tmp_path, CHATML, [record(*weights, texts=texts)])
        for weights in ((1, 1, 0), (0, 1, 1))
    )
    assert len(first.ids) < len(last.ids)
    assert first.trained.any()
    assert not last.trained[: len(first.ids)].any()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": (
        record(1, -1, 1),
        (
            "message 5 has the weight -1; expected a number of at least 0: 0 leaves the turn out "
            "of the loss, and 1 counts it as without a weight"
        ),
    ),
    "a text": (record("1", 1, 1), "message 3 has the weight '1'; expected a number of at least 0"),
    "a boolean": (record(True, 1, 1), "message 3 has the weight True; expected a number"),
    "no number": (record(float("nan"), 1, 1), "message 3 has the weight nan; expected a number"),
    "infinite": (record(float("inf"), 1, 1), "message 3 has the weight inf; expected a number"),
    "all masked": (
        record(0, 0, 0),
        (
            "every turn of the assistant has the weight 0, so nothing is trained; give one of them "
            "a weight above 0, or remove the row"
        ),
    ),
    "of the user": (
        {"messages": [{"role": "user", "content": "a", "weight": 1}, record()["messages"][2]]},
        (
            "message 1 has the weight 1 and the role 'user'; weights are of the assistant's turns, "
            "so remove it"
        ),
    ),
    "an unknown role": (
        {"conversations": [{"from": "bot", "value": "a"}]},
        "message 1 has the role 'bot'; expected one of system, user, human, assistant, gpt, ",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_weight_or_role_is_one_message(tmp_path: Path, kind: str) -> None:
    values, wanted = WRONG[kind]
    path = write_lines(tmp_path / "a.jsonl", [record(), values])
    (problem,) = sample_reader("chat", (), Conversation).problems([path])
    assert problem.startswith(f"{path}:2: {wanted}")


def test_a_null_is_no_weight(tmp_path: Path) -> None:
    values = record()
    for message in values["messages"]:
        message["weight"] = None
    encoded = encode(tmp_path, CHATML, [values])
    assert encoded.trained.tolist() == encode(tmp_path, CHATML, [record()]).trained.tolist()


def test_the_answers_of_pairs_have_no_weights(tmp_path: Path) -> None:
    from ascend_run.text.samples import Preference

    answer = {"from": "gpt", "value": "a"}
    pair = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {**answer, "weight": 0.5},
        "rejected": {**answer, "value": "b"},
    }
    path = write_lines(tmp_path / "a.jsonl", [pair])
    (problem,) = sample_reader("sharegpt-pairwise", (), Preference).problems([path])
    assert problem == (
        f"{path}:1: 'chosen' has the weight 0.5, and only turns of whole conversations "
        "have one; remove it"
    )


def test_weights_of_texts_that_are_no_turns_are_refused(tmp_path: Path) -> None:
    halves = GENERATION.replace(
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{% generation %}{{ message.content }}{% endgeneration %}:"
        "{% generation %}<|im_end|>{% endgeneration %}",
    )
    with pytest.raises(DataError) as error:
        encode(tmp_path, halves, [record(1, 0.5, 1)])
    assert re.search(
        r"it marks 6 texts as generated for 3 turns of the assistant, so their weights 1\.0, 0\.5, "
        r"1\.0 cannot be assigned; leave the weights out, or use another template",
        error.value.problems[0],
    )


def preprocessed(folder: Path, records: list[Any], **options: Any) -> str:
    prefix = folder / "tokens"
    preprocess_samples(
        SampleOptions(
            inputs=(Path(write_lines(folder / "in.jsonl", records)),),
            output_prefix=prefix,
            handler="chat",
            tokenizer=write_tokenizer(folder / "tokenizer", CHATML),
            overwrite=True,
            **options,
        )
    )
    return str(prefix)


@pytest.mark.parametrize("option", [None, "train_on_inputs", "mask_history"])
def test_token_files_have_the_samples_of_their_source(tmp_path: Path, option: str | None) -> None:
    options = {option: True} if option else {}
    records = [record(), record(1, 0, 1)]
    prefix = preprocessed(tmp_path, records, **options)
    source = encode(tmp_path, CHATML, records, **options)
    files = encoded_dataset(prefix, NO_LIMIT, NoCache())
    assert files.ids.tolist() == source.ids.tolist()
    assert files.trained.tolist() == source.trained.tolist()
    mine = encoder(tmp_path, CHATML, **options)
    check_sample_dataset(prefix, "Conversation", mine)
    others = {"mask_history", "train_on_inputs"} - {option}
    for other in others:
        with pytest.raises(DataError, match=f"was made with another .*{other}"):
            check_sample_dataset(prefix, "Conversation", encoder(tmp_path, CHATML, **{other: True}))


def test_token_files_hold_no_fractions(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        preprocessed(tmp_path, [record(1, 0.5, 1)])
    assert error.value.problems[0].endswith(
        "in.jsonl:1: a turn has the weight 0.5, and token files hold 0 or 1; round it, or name the "
        "source itself in data.train"
    )


def test_what_is_trained_of_token_files_is_one_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot preprocess") as error:
        preprocessed(tmp_path, [record()], train_on_inputs=True, mask_history=True)
    assert error.value.problems == (
        "--train-on-inputs trains every token, and --mask-history the last turn; name one",
    )
