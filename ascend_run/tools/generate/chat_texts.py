"""Conversations to token ids, by the chat template of a tokenizer. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api.errors import DataError
from ascend_run.text.chat_tokenizer import read_tokenizer_config, tokenizer_folder
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.templates import ChatTemplate

from .texts import Texts


@attrs.frozen(kw_only=True, eq=False)
class ChatTexts:
    """A tokenizer, and its chat template if there is one."""

    texts: Texts
    """With the end tokens of a chat."""
    template: ChatTemplate | None
    no_template: str = ""
    """Why there is none."""


def with_template(texts: Texts, choice: str | None, *, tools: bool = False) -> ChatTexts:
    """Open the chat template of a tokenizer.

    Args:
        choice: The user's: a known name, or a file.
        tools: Whether it is to render tools: a tokenizer may have another template for them.

    Raises:
        DataError: The user chose a template, and it cannot be used.
    """
    folder = tokenizer_folder(texts.path)
    if choice is None and not _has_template(folder):
        reason = f"{folder} has no chat template; --template names one"
        return ChatTexts(texts=texts, template=None, no_template=reason)
    options = ChatOptions(
        tokenizer=texts.path,
        template=choice,
        date=time.strftime("%Y-%m-%d"),
        tools=tools,
        tokenizer_option="--tokenizer",
        template_option="--template",
        date_option="--template",
    )
    try:
        tokenizer, template = open_chat(options)
    except DataError as problem:
        if choice is not None:
            raise
        return ChatTexts(texts=texts, template=None, no_template="; ".join(problem.problems))
    texts = attrs.evolve(texts, end_ids=texts.end_ids | {tokenizer.eos_id})
    return ChatTexts(texts=texts, template=template)


def _has_template(folder: Path) -> bool:
    """Whether a tokenizer's folder has a template, or may have one in a file that is broken."""
    try:
        config = read_tokenizer_config(folder)
    except ValueError:
        return True
    return "chat_template" in config or (folder / "chat_template.jinja").is_file()


def chat_ids(
    texts: Texts,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
) -> tuple[int, ...]:
    """Return the ids of messages, up to where the assistant's answer begins.

    Raises:
        TemplateRefusal: The template cannot render them.
    """
    rendered = template.render(messages, tools, prompt=True)
    # The template spells the special tokens that the tokenizer would add.
    return tuple(texts.tokenizer.backend.encode(rendered, add_special_tokens=False).ids)
