"""Check the tokenizer, the template and the data files before a run starts. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.plugin_api import AscendRunError, DataError
from ascend_run.text.chat_tokenizer import (
    ChatTokenizer,
    load_chat_tokenizer,
    read_tokenizer_config,
    tokenizer_folder,
)
from ascend_run.text.reading import SampleReader, sample_reader
from ascend_run.text.samples import Conversation
from ascend_run.text.templates import ChatTemplate, template_source

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import SftConfig


def source_problems(config: RunConfig, options: SftConfig) -> list[str]:
    """Return everything that is wrong with what ``[data]`` names, one sentence each."""
    problems: list[str] = []
    try:
        open_tokenizer(config, options)
    except DataError as error:
        problems += error.problems
    try:
        reader = open_reader(options)
    except AscendRunError as error:
        problems += error.problems or [error.headline]
    else:
        paths = dict.fromkeys((*config.data.train, *config.data.validation))
        problems += reader.problems([*paths])
    return [problem if problem.startswith("sft: ") else f"sft: {problem}" for problem in problems]


def open_tokenizer(config: RunConfig, options: SftConfig) -> tuple[ChatTokenizer, ChatTemplate]:
    """Return the tokenizer and the chat template of a run.

    Raises:
        DataError: The tokenizer or the template cannot be used; lists every problem of both.
    """
    problems: list[str] = []
    if config.data.tokenizer is None:
        problem = (
            "data.tokenizer is missing; name the folder of the model's tokenizer, with "
            "tokenizer.json and tokenizer_config.json"
        )
        raise _refusal([problem])
    folder = tokenizer_folder(config.data.tokenizer)
    if not folder.is_dir():
        raise _refusal([f"data.tokenizer: there is no folder {folder}"])
    tokenizer = template = None
    try:
        tokenizer_config = read_tokenizer_config(folder)
    except ValueError as error:
        raise _refusal([str(error)]) from None
    try:
        tokenizer = load_chat_tokenizer(folder, tokenizer_config)
    except ValueError as error:
        problems.append(str(error))
    try:
        source, name = template_source(options.template, folder, tokenizer_config)
        template = ChatTemplate(
            source=source,
            name=name,
            variables=tokenizer.variables if tokenizer else {},
            date=options.date,
        )
    except (ValueError, OSError) as error:
        problems.append(str(error))
    vocabulary = config.model.vocab_size
    if tokenizer is not None and vocabulary and tokenizer.vocab_size > vocabulary:
        problems.append(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but model.vocab_size is "
            f"{vocabulary}; name the model's own tokenizer, or set model.vocab_size"
        )
    if problems or tokenizer is None or template is None:
        raise _refusal(problems)
    return tokenizer, template


def open_reader(options: SftConfig) -> SampleReader:
    """Return what reads the conversations of a run.

    Raises:
        ConfigError: The handler or the mapping of its keys cannot be used.
        PluginLoadError: The handler cannot be imported.
    """
    return sample_reader(options.handler, options.map_keys, Conversation)


def _refusal(problems: list[str]) -> DataError:
    return DataError("the data of this run cannot be used", problems)
