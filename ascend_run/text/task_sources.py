"""What a task reads samples with, and what is wrong with what a run names. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import AscendRunError, DataError

from .encoder import Encoder
from .opening import ChatOptions, open_chat
from .reading import SampleReader, sample_reader
from .sample_files import check_sample_dataset, is_sample_dataset

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from .samples import Sample


@attrs.frozen(kw_only=True)
class TaskSources:
    """The tokenizer, chat template and data handler of a task's samples."""

    task: str  #: Its name, for error messages.
    kind: type[Sample]  #: What the handler has to make.
    handler: str
    map_keys: tuple[str, ...] = ()
    template: str | None = None
    date: str | None = None
    keeps_special: bool = False
    """Keep samples whose text contains a special token of the tokenizer."""
    train_on_inputs: bool = False
    mask_history: bool = False

    def problems(self, config: RunConfig) -> list[str]:
        """Return everything that is wrong with what ``[data]`` names, one sentence each."""
        problems: list[str] = []
        encoder = None
        try:
            encoder = self.open_encoder(config)
        except DataError as error:
            problems += error.problems
        paths = dict.fromkeys((*config.data.train, *config.data.validation))
        datasets = [path for path in paths if is_sample_dataset(path)]
        try:
            reader = self.open_reader()
        except AscendRunError as error:
            problems += error.problems or [error.headline]
        else:
            problems += reader.problems([path for path in paths if path not in datasets])
        for prefix in datasets:
            try:
                check_sample_dataset(prefix, self.kind.__name__, encoder)
            except DataError as error:
                problems.append(error.headline)
        named = f"{self.task}: "
        return [each if each.startswith(named) else named + each for each in problems]

    def open_encoder(self, config: RunConfig) -> Encoder:
        """Return what encodes the samples of a run, by its tokenizer and chat template.

        Raises:
            DataError: The tokenizer or the template cannot be used; lists every problem of both.
        """
        tokenizer, template = open_chat(
            ChatOptions(
                tokenizer=config.data.tokenizer,
                template=self.template,
                date=self.date,
                vocab_size=config.model.vocab_size,
                tokenizer_option="data.tokenizer",
                template_option=f"plugins.{self.task}.template",
                date_option=f"plugins.{self.task}.date",
            )
        )
        return Encoder(
            tokenizer=tokenizer,
            template=template,
            keeps_special=self.keeps_special,
            train_on_inputs=self.train_on_inputs,
            mask_history=self.mask_history,
        )

    def open_reader(self) -> SampleReader:
        """Return what reads the samples of a run.

        Raises:
            ConfigError: The handler or the mapping of its keys cannot be used.
            PluginLoadError: The handler cannot be imported.
        """
        return sample_reader(self.handler, self.map_keys, self.kind)
