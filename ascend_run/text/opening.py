"""Open the tokenizer of a folder with its chat template, or report every problem of both."""

from __future__ import annotations

from pathlib import Path

import attrs

from ascend_run.plugin_api import DataError

from .chat_tokenizer import (
    ChatTokenizer,
    load_chat_tokenizer,
    read_tokenizer_config,
    tokenizer_folder,
)
from .templates import ChatTemplate, template_source


@attrs.frozen(kw_only=True)
class ChatOptions:
    """What the user named; the names of the options are for error messages."""

    tokenizer: str | Path | None
    template: str | None = None
    date: str | None = None
    vocab_size: int | None = None
    """``model.vocab_size`` of the run, if there is one."""
    tools: bool = False
    """Whether the template is to render tools."""
    tokenizer_option: str
    template_option: str
    date_option: str


def open_chat(options: ChatOptions) -> tuple[ChatTokenizer, ChatTemplate]:
    """Return a tokenizer and a chat template.

    Raises:
        DataError: The tokenizer or the template cannot be used; lists every problem of both.
    """
    named = options.tokenizer_option
    if options.tokenizer is None:
        raise _refusal(
            f"{named} is missing; name the folder of the model's tokenizer, with tokenizer.json "
            "and tokenizer_config.json"
        )
    folder = tokenizer_folder(options.tokenizer)
    if not folder.is_dir():
        raise _refusal(f"{named}: there is no folder {folder}")
    try:
        tokenizer_config = read_tokenizer_config(folder)
    except ValueError as error:
        raise _refusal(str(error)) from None
    problems: list[str] = []
    tokenizer = template = None
    try:
        named_file = Path(options.tokenizer) if folder != Path(options.tokenizer) else None
        tokenizer = load_chat_tokenizer(folder, tokenizer_config, named, named_file)
    except ValueError as error:
        problems.append(str(error))
    try:
        source, name = template_source(
            options.template,
            folder,
            tokenizer_config,
            options.template_option,
            tools=options.tools,
        )
        template = ChatTemplate(
            source=source,
            name=name,
            variables=tokenizer.variables if tokenizer else {},
            date=options.date,
            date_option=options.date_option,
        )
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if tokenizer and options.vocab_size and tokenizer.vocab_size > options.vocab_size:
        problems.append(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but model.vocab_size is "
            f"{options.vocab_size}; name the model's own tokenizer, or set model.vocab_size"
        )
    if problems or tokenizer is None or template is None:
        raise _refusal(*problems)
    return tokenizer, template


def _refusal(*problems: str) -> DataError:
    return DataError("the tokenizer or its chat template cannot be used", problems)
