"""Open a stored model to serve it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugin_api.errors import ConfigError, DataError
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.templates import ChatTemplate
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from ascend_run.tools.generate.session import Session
from ascend_run.tools.generate.texts import Texts

from .served_model import ServedModel


@attrs.frozen(kw_only=True)
class ServeQuestion:
    """What a user wants to be served."""

    model: Path
    options: SourceOptions = attrs.field(factory=SourceOptions)
    tokenizer: Path | None = None
    template: str | None = None
    dtype: str | None = None
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
    texts, template, problem = _with_template(texts, question.template)
    dtype = None if question.dtype is None else DTYPES[question.dtype]
    with loaded_model(question.model, question.options, dtype) as model:
        num_tokens = _cache_tokens(model, question)
        engine = model.engine(num_tokens, max_sequences=question.max_sequences)
        served = ServedModel(
            name=question.name or question.model.resolve().name,
            created=int(time.time()),
            texts=texts,
            template=template,
            no_template=problem,
            max_length=min(model.max_length, num_tokens),
            vocab_size=model.config.model.vocab_size,
        )
        yield served, Session(engine, texts)


def _with_template(texts: Texts, choice: str | None) -> tuple[Texts, ChatTemplate | None, str]:
    """Return the texts with the end tokens of a chat, the template, and why there is none.

    Raises:
        DataError: The user chose a template, and it cannot be used.
    """
    options = ChatOptions(
        tokenizer=texts.path,
        template=choice,
        date=time.strftime("%Y-%m-%d"),
        tokenizer_option="--tokenizer",
        template_option="--template",
        date_option="--template",
    )
    try:
        tokenizer, template = open_chat(options)
    except DataError as problem:
        if choice is not None:
            raise
        return texts, None, "; ".join(problem.problems)
    return attrs.evolve(texts, end_ids=texts.end_ids | {tokenizer.eos_id}), template, ""


def _cache_tokens(model: GenerationModel, question: ServeQuestion) -> int:
    """
    Raises:
        ConfigError: The cache is larger than the free memory.
    """
    import psutil

    of_token = _token_bytes(model)
    free: int = psutil.virtual_memory().available
    wanted = question.cache_tokens
    if wanted is None:
        longest = question.max_sequences * model.max_length
        return max(min(longest, free // 2 // of_token), 1)
    if wanted * of_token > free:
        problem = (
            f"--cache-tokens {wanted} take {wanted * of_token / 1e9:.1f} GB; at most "
            f"{free // of_token} fit into the free memory"
        )
        raise ConfigError("the model cannot be served", [problem])
    return wanted


def _token_bytes(model: GenerationModel) -> int:
    """Return the bytes of one token's keys and values, as a step stores them."""
    cache = model.with_cache(1)
    cache.reserve(0, 1)
    model.logits(Step.of([Chunk(sequence=0, start=0, ids=[0], num_logits=0)]))
    return cache.num_bytes // cache.page_size
