"""Samples that cannot be encoded, and whose fault it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.plugin_api import DataError
from ascend_run.text.encoder import Encoder, accepted
from ascend_run.text.omissions import Omissions
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.samples import Conversation
from ascend_run.text.templates import MARK
from tests.support.chats import SHORT, write_tokenizer


def test_only_what_a_template_rejects_names_it(tmp_path: Path) -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    folder = write_tokenizer(tmp_path, strict)
    named = ChatOptions(tokenizer=folder, tokenizer_option="", template_option="", date_option="")
    tokenizer, template = open_chat(named)
    encoder = Encoder(tokenizer=tokenizer, template=template, keeps_special=True)
    marked = Conversation(messages=({"role": "user", "content": MARK},))
    results = encoder.label([Conversation(messages=tuple(SHORT)), marked])
    with pytest.raises(DataError, match="these samples cannot be encoded") as error:
        [*accepted(iter([(["a:1", "a:2"], results)]), Omissions())]
    assert error.value.problems == (
        f"a:1: {folder / 'tokenizer_config.json'} rejects it: roles must alternate",
        "a:2: it holds the code points U+10FFF0 to U+10FFF2",
    )
