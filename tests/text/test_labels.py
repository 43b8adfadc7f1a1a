"""Which tokens are the assistant's: against transformers, and by decoding the trained tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ascend_run.text.chat_tokenizer import (
    ChatTokenizer,
    load_chat_tokenizer,
    read_tokenizer_config,
)
from ascend_run.text.labelling import Labelled, label
from ascend_run.text.samples import Conversation
from ascend_run.text.templates import (
    ChatTemplate,
    TemplateRefusal,
    template_source,
)
from ascend_run.text.turns import render
from tests.support.chats import (
    CHATML,
    GENERATION,
    LAST_TURN_THINKS,
    LLAMA2,
    LONG,
    SHORT,
    UNCLOSED,
    bytes_tokenizer,
    greedy_tokenizer,
    metaspace_tokenizer,
    write_tokenizer,
)

BACKENDS = {
    "bytes": bytes_tokenizer,
    "greedy": greedy_tokenizer,
    "metaspace": metaspace_tokenizer,
}


class Labeller:
    """A tokenizer's folder, as the task reads it."""

    def __init__(self, folder: Path, choice: str | None = None) -> None:
        config = read_tokenizer_config(folder)
        self.tokenizer: ChatTokenizer = load_chat_tokenizer(folder, config)
        source, name = template_source(choice, folder, config)
        self.template = ChatTemplate(
            source=source, name=name, variables=self.tokenizer.variables, date=None
        )

    def __call__(self, messages: list[dict[str, Any]]) -> Labelled:
        rendered = render(self.template, Conversation(messages=tuple(messages)))
        (tokens,) = self.tokenizer.tokens.encode([rendered.text])
        return label(rendered, tokens, self.tokenizer)

    def turns(self, messages: list[dict[str, Any]]) -> list[str]:
        """Return the text of each run of trained tokens."""
        labelled = self(messages)
        runs: list[list[int]] = []
        before = False
        for number, trained in zip(labelled.ids, labelled.trained, strict=True):
            if trained and not before:
                runs.append([])
            if trained:
                runs[-1].append(number)
            before = trained
        return [self.tokenizer.backend.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["one turn", "two turns"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("template", [CHATML, LLAMA2], ids=["chatml", "llama2"])
def test_the_tokens_are_those_of_transformers(
    tmp_path: Path, backend: str, template: str, messages: list[dict[str, Any]]
) -> None:
    if template is LLAMA2:
        messages = [message for message in messages if message["role"] != "system"]
    write_tokenizer(tmp_path, template, BACKENDS[backend]())
    ours = Labeller(tmp_path)(messages)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert ours.ids == expected[: len(ours.ids)]
    # What follows the last trained token, a line end, is not needed.
    assert not theirs.decode(expected[len(ours.ids) :]).strip()


@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["one turn", "two turns"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_blocks_are_trained_as_transformers_marks_them(
    tmp_path: Path, backend: str, messages: list[dict[str, Any]]
) -> None:
    write_tokenizer(tmp_path, GENERATION, BACKENDS[backend]())
    ours = Labeller(tmp_path)(messages)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = theirs["assistant_masks"]
    assert ours.ids == theirs["input_ids"][: len(ours.ids)]
    assert [int(trained) for trained in ours.trained] == mask[: len(ours.ids)]
    assert not any(mask[len(ours.ids) :])


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_mark_the_same_tokens_as_generation_blocks(tmp_path: Path, backend: str) -> None:
    plain = Labeller(write_tokenizer(tmp_path / "plain", CHATML, BACKENDS[backend]()))
    blocks = Labeller(write_tokenizer(tmp_path / "blocks", GENERATION, BACKENDS[backend]()))
    assert plain(LONG) == blocks(LONG)


def test_each_turn_is_trained_with_the_token_that_closes_it(tmp_path: Path) -> None:
    assert Labeller(write_tokenizer(tmp_path)).turns(LONG) == [
        "three four, and then five<|im_end|>",
        "six seven<|im_end|>",
    ]


def test_a_template_with_begin_and_end_of_each_turn(tmp_path: Path) -> None:
    labeller = Labeller(write_tokenizer(tmp_path, LLAMA2))
    messages = LONG[1:]
    assert labeller.turns(messages) == [
        " three four, and then five </s>",
        " six seven </s>",
    ]
    assert labeller(messages).ids.count(labeller.tokenizer.bos_id) == 2


@pytest.mark.parametrize("backend", ["bytes", "greedy"])
def test_turns_that_the_template_does_not_close_end_with_eos(tmp_path: Path, backend: str) -> None:
    labeller = Labeller(write_tokenizer(tmp_path, UNCLOSED, BACKENDS[backend]()))
    turns = labeller.turns(LONG)
    assert [turn.rstrip("\n").endswith("</s>") for turn in turns] == [True, True]
    assert ["five" in turns[0], "seven" in turns[1]] == [True, True]
    assert labeller(LONG).ids.count(labeller.tokenizer.eos_id) == 2
    assert labeller(LONG).ids[-1] == labeller.tokenizer.eos_id


def test_a_token_that_reaches_over_the_border_is_the_assistants(tmp_path: Path) -> None:
    labeller = Labeller(write_tokenizer(tmp_path, UNCLOSED, greedy_tokenizer()))
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "Paris."}]
    text = "user: one two\nassistant: Paris.\n"
    pieces = labeller.tokenizer.backend.encode(text, add_special_tokens=False)
    border = text.index("Paris")
    assert any(begin < border < end for begin, end in pieces.offsets), "the tokenizer merges"
    assert labeller.turns(messages)[0].rstrip("\n").endswith("Paris.</s>")


def test_an_earlier_turn_that_is_rendered_otherwise_is_found_all_the_same(tmp_path: Path) -> None:
    assert Labeller(write_tokenizer(tmp_path, LAST_TURN_THINKS)).turns(LONG) == [
        "three four, and then five<|im_end|>",
        "<think>\n\n</think>\n\nsix seven<|im_end|>",
    ]


def test_template_text_before_an_earlier_reply_is_trained(tmp_path: Path) -> None:
    noting = LAST_TURN_THINKS.replace(
        "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}",
        "{{ 'last: ' if loop.last else 'earlier: ' }}",
    )
    assert noting != LAST_TURN_THINKS
    assert Labeller(write_tokenizer(tmp_path, noting)).turns(LONG) == [
        "earlier: three four, and then five<|im_end|>",
        "last: six seven<|im_end|>",
    ]


def test_a_turn_that_says_nothing_is_not_trained(tmp_path: Path) -> None:
    labeller = Labeller(write_tokenizer(tmp_path))
    silent = [{**message, "content": " "} if index == 2 else message
              for index, message in enumerate(LONG)]  # fmt: skip
    assert labeller.turns(silent) == ["six seven<|im_end|>"]
    assert labeller([SHORT[0], {"role": "assistant", "content": ""}]) == Labelled([], [])


def test_a_begin_token_that_stands_twice_is_one(tmp_path: Path) -> None:
    doubled = "{{ bos_token }}{{ bos_token }}" + CHATML
    labeller = Labeller(write_tokenizer(tmp_path, doubled))
    bos = labeller.tokenizer.bos_id
    assert labeller(SHORT).ids[:2] == [bos, labeller.tokenizer.backend.token_to_id("<|im_start|>")]


@pytest.mark.parametrize("name", ["alpaca", "chatml", "vicuna"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_named_templates_close_every_turn_once(tmp_path: Path, backend: str, name: str) -> None:
    folder = write_tokenizer(tmp_path, None, BACKENDS[backend]())
    labeller = Labeller(folder, name)
    turns = labeller.turns(LONG)
    closing = "<|im_end|>" if name == "chatml" else "</s>"
    assert [turn.count(closing) for turn in turns] == [1, 1]
    assert all(turn.endswith(closing) for turn in turns)
    assert ["four" in turns[0], "seven" in turns[1]] == [True, True]
    labelled = labeller(LONG)
    if name != "chatml":
        assert labelled.ids[0] == labeller.tokenizer.bos_id
        assert labelled.ids.count(labeller.tokenizer.bos_id) == 1


def test_a_template_that_hides_what_is_said_is_refused(tmp_path: Path) -> None:
    counting = (
        "{% for message in messages %}{{ message.content | length }}|{{ loop.length }}{% endfor %}"
    )
    labeller = Labeller(write_tokenizer(tmp_path, counting))
    with pytest.raises(TemplateRefusal, match="message 3 cannot be located"):
        labeller(LONG)


def test_the_error_of_a_template_is_reported(tmp_path: Path) -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        Labeller(write_tokenizer(tmp_path, strict))(SHORT)


def test_todays_date_must_be_set(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%Y') }}" + CHATML
    labeller = Labeller(write_tokenizer(tmp_path, dated))
    with pytest.raises(TemplateRefusal, match=r"set plugins\.sft\.date"):
        labeller(SHORT)
    told = ChatTemplate(source=dated, name="here", variables={}, date="2024-02-03")
    assert told.render(SHORT).startswith("2024<|im_start|>")


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(TemplateRefusal, match=r"unsafe|not safely"):
            Labeller(write_tokenizer(tmp_path, source))(SHORT)


def test_special_tokens_with_properties_are_read(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token={"content": "<|im_end|>", "special": True})
    tokenizer = Labeller(folder).tokenizer
    assert tokenizer.eos_id == Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(
        "<|im_end|>"
    )


def test_the_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "not this one")
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Labeller(folder).turns(SHORT) == ["Paris.<|im_end|>"]
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    listed = write_tokenizer(tmp_path / "several", None, chat_template=several)
    assert Labeller(listed).turns(SHORT) == ["Paris.<|im_end|>"]
