"""Check the tokenizer, the template and the data files before a run starts. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.plugin_api import AscendRunError, DataError
from ascend_run.text.chat_tokenizer import ChatTokenizer
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.reading import SampleReader, sample_reader
from ascend_run.text.samples import Conversation
from ascend_run.text.templates import ChatTemplate

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
    return open_chat(
        ChatOptions(
            tokenizer=config.data.tokenizer,
            template=options.template,
            date=options.date,
            vocab_size=config.model.vocab_size,
            tokenizer_option="data.tokenizer",
            template_option="plugins.sft.template",
            date_option="plugins.sft.date",
        )
    )


def open_reader(options: SftConfig) -> SampleReader:
    """Return what reads the conversations of a run.

    Raises:
        ConfigError: The handler or the mapping of its keys cannot be used.
        PluginLoadError: The handler cannot be imported.
    """
    return sample_reader(options.handler, options.map_keys, Conversation)
