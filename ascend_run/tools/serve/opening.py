"""Open a stored model to serve it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.cache_size import cache_tokens
from ascend_run.tools.generate.chat_texts import with_template
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.generate.model_options import ModelOptions
from ascend_run.tools.generate.session import Session

from .served_model import ServedModel


@attrs.frozen(kw_only=True)
class ServeQuestion:
    """What a user wants to be served."""

    model: Path
    options: SourceOptions = attrs.field(factory=SourceOptions)
    tokenizer: Path | None = None
    template: str | None = None
    dtype: str | None = None
    rope_length: int | None = None
    name: str | None = None
    """Default: that of the folder."""
    max_sequences: int = 16
    cache_tokens: int | None = None
    """Default: what the sequences need at their longest, and at most half of the free memory."""


@contextmanager
def opened(question: ServeQuestion) -> Iterator[tuple[ServedModel, Session]]:
    """Load a model with its tokenizer and its template; everything is undone on exit.

    Raises:
        AscendRunError: One of them cannot be read; or the cache is larger than the free memory.
    """
    texts = model_texts(question.model, question.options, question.tokenizer)
    chat = with_template(texts, question.template)
    dtype = None if question.dtype is None else DTYPES[question.dtype]
    model_options = ModelOptions(rope_length=question.rope_length)
    with loaded_model(question.model, question.options, dtype, model_options) as model:
        num_tokens = cache_tokens(model, question.cache_tokens, question.max_sequences)
        engine = model.engine(num_tokens, max_sequences=question.max_sequences)
        served = ServedModel(
            name=question.name or question.model.resolve().name,
            created=int(time.time()),
            texts=chat.texts,
            template=chat.template,
            no_template=chat.no_template,
            max_length=min(model.max_length, num_tokens),
            vocab_size=model.config.model.vocab_size,
        )
        yield served, Session(engine, chat.texts)
