"""Evaluate a stored model."""

from __future__ import annotations

from pathlib import Path

import attrs

from ascend_run.text.dataset_paths import is_source
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.model import loaded_model

from .perplexity import WindowOptions, perplexities
from .progress import Progress
from .results import Results
from .token_streams import DataOptions, token_streams


@attrs.frozen(kw_only=True)
class Evaluation:
    """What a user asks for."""

    model: Path
    options: SourceOptions
    tokenizer: Path | None
    dtype: str | None
    data: tuple[str, ...] = ()
    reading: DataOptions = attrs.field(factory=DataOptions)
    windows: WindowOptions = attrs.field(factory=WindowOptions)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether there is text to encode."""
        return any(map(is_source, self.data))


def evaluated(asked: Evaluation, progress: Progress) -> Results:
    """Read all data, then load the model and measure it.

    Raises:
        AscendRunError: The data, the tokenizer or the model cannot be used.
    """
    texts = None
    if asked.needs_tokenizer:
        texts = model_texts(asked.model, asked.options, asked.tokenizer)
    streams = token_streams(asked.data, asked.reading, texts.tokenizer if texts else None)
    dtype = None if asked.dtype is None else DTYPES[asked.dtype]
    with loaded_model(asked.model, asked.options, dtype) as model:
        return Results(
            model=str(asked.model),
            perplexities=tuple(perplexities(model, streams, asked.windows, progress)),
        )
