"""Check the tokenizer, the template and the data files before a run starts. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.plugin_api import AscendRunError, DataError
from ascend_run.text.encoder import Encoder
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.reading import SampleReader, sample_reader
from ascend_run.text.sample_files import check_sample_dataset, is_sample_dataset
from ascend_run.text.samples import Conversation

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import SftConfig


def source_problems(config: RunConfig, options: SftConfig) -> list[str]:
    """Return everything that is wrong with what ``[data]`` names, one sentence each."""
    problems: list[str] = []
    encoder = None
    try:
        encoder = open_encoder(config, options)
    except DataError as error:
        problems += error.problems
    paths = dict.fromkeys((*config.data.train, *config.data.validation))
    datasets = [path for path in paths if is_sample_dataset(path)]
    try:
        reader = open_reader(options)
    except AscendRunError as error:
        problems += error.problems or [error.headline]
    else:
        problems += reader.problems([path for path in paths if path not in datasets])
    for prefix in datasets:
        try:
            check_sample_dataset(prefix, Conversation.__name__, encoder)
        except DataError as error:
            problems.append(error.headline)
    return [problem if problem.startswith("sft: ") else f"sft: {problem}" for problem in problems]


def open_encoder(config: RunConfig, options: SftConfig) -> Encoder:
    """Return what encodes the conversations of a run, by its tokenizer and chat template.

    Raises:
        DataError: The tokenizer or the template cannot be used; lists every problem of both.
    """
    tokenizer, template = open_chat(
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
    return Encoder(
        tokenizer=tokenizer, template=template, keeps_special=options.special_tokens == "keep"
    )


def open_reader(options: SftConfig) -> SampleReader:
    """Return what reads the conversations of a run.

    Raises:
        ConfigError: The handler or the mapping of its keys cannot be used.
        PluginLoadError: The handler cannot be imported.
    """
    return sample_reader(options.handler, options.map_keys, Conversation)
