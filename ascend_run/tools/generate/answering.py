"""Answer prompts with a stored model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.engine import Emitted, Finish, Request, cache_tokens
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.formats.run_checkpoints import CheckpointSource
from ascend_run.tools.convert.opening import Format, recognised
from ascend_run.tools.convert.source_options import SourceOptions

from .model import GenerationModel, loaded_model
from .model_options import ModelOptions
from .searching import searched, searched_tokens
from .session import Session
from .texts import Texts, open_texts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_MAX_SEQUENCES = 16
OnText = Callable[[int, str], None]
"""Takes the index of a prompt and a piece of its answer."""


@attrs.frozen(kw_only=True)
class Question:
    """What a user asks for."""

    model: Path
    options: SourceOptions
    tokenizer: Path | None
    dtype: str | None
    prompts: Sequence[str]
    max_new_tokens: int
    model_options: ModelOptions = attrs.field(factory=ModelOptions)
    sampling: Sampling = attrs.field(factory=Sampling)
    stop: tuple[str, ...] = ()
    search: BeamSearch | None = None
    """Takes the place of sampling, stop words and log-probabilities."""


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """A token with its log-probability, by the model's own distribution."""

    id: int
    token: str
    logprob: float


Logprobs = tuple[tuple[TokenLogprob, tuple[TokenLogprob, ...]], ...]
"""Of each new token, with those of the most probable ones."""


@attrs.frozen(kw_only=True)
class Answer:
    """What follows one prompt."""

    prompt: str
    text: str
    """Without the stop word that ended it."""
    ids: tuple[int, ...]
    """The new ids, with the one that ended the text."""
    finish: Finish
    prompt_tokens: int
    logprobs: Logprobs | None = None
    """None: not asked for."""

    score: float | None = None
    """Of a search: its log-probability by the length penalty."""

    @property
    def new_tokens(self) -> int:
        return len(self.ids)


@attrs.define(eq=False)
class _Open:
    """An answer that is not complete."""

    prompt: str
    prompt_tokens: int
    emitted: list[Emitted] = attrs.field(factory=list)
    text: str = ""
    finish: Finish | None = None


def answers(question: Question, on_text: OnText = lambda index, text: None) -> Iterator[Answer]:
    """Answer prompts as one batch; the answers are in their order.

    Args:
        on_text: Called with each piece of an answer, as they come.

    Raises:
        AscendRunError: The model or its tokenizer cannot be read, or a prompt cannot be answered.
    """
    texts = model_texts(question.model, question.options, question.tokenizer)
    prompts = [texts.ids(prompt) for prompt in question.prompts]
    dtype = None if question.dtype is None else DTYPES[question.dtype]

    def requests(longest: int) -> list[Request]:
        """Of the prompts that can be answered."""
        return [
            Request(
                prompt=ids,
                max_new_tokens=min(question.max_new_tokens, longest - len(ids)),
                end_ids=texts.end_ids,
                sampling=question.sampling.of_prompt(index),
            )
            for index, ids in enumerate(prompts)
            if 0 < len(ids) < longest
        ]

    def needed_tokens(longest: int) -> int:
        if question.search is not None:
            return searched_tokens(requests(longest), question.search)
        return cache_tokens(requests(longest), _MAX_SEQUENCES)

    with loaded_model(
        question.model, question.options, dtype, question.model_options, needed_tokens
    ) as model:
        _require_answerable(prompts, model)
        asked = requests(model.max_length)
        if question.search is None:
            yield from _chosen(question, model, texts, asked, on_text)
        else:
            found = searched(model, asked, question.search)
            for index, one in enumerate(found):
                text = texts.continuation(prompts[index], one.ids)
                on_text(index, text)
                yield Answer(
                    prompt=question.prompts[index],
                    text=text,
                    ids=one.ids,
                    finish=one.finish,
                    prompt_tokens=len(prompts[index]),
                    score=one.score,
                )


def _chosen(
    question: Question,
    model: GenerationModel,
    texts: Texts,
    requests: Sequence[Request],
    on_text: OnText,
) -> Iterator[Answer]:
    """Answer token by token."""
    num_tokens = cache_tokens(requests, _MAX_SEQUENCES)
    session = Session(model.engine(num_tokens, max_sequences=_MAX_SEQUENCES), texts)
    numbers = {session.submit(one, question.stop): at for at, one in enumerate(requests)}
    opened = [
        _Open(prompt, len(request.prompt))
        for prompt, request in zip(question.prompts, requests, strict=True)
    ]
    num_done = 0
    while num_done < len(opened):
        for piece in session.step():
            index = numbers[piece.emitted.sequence]
            one = opened[index]
            one.emitted.append(piece.emitted)
            one.text, one.finish = one.text + piece.text, piece.finish
            on_text(index, piece.text)
        while num_done < len(opened) and opened[num_done].finish is not None:
            yield _answer(opened[num_done], texts)
            num_done += 1


def _answer(one: _Open, texts: Texts) -> Answer:
    assert one.finish is not None
    return Answer(
        prompt=one.prompt,
        text=one.text,
        ids=tuple(emitted.token for emitted in one.emitted),
        finish=one.finish,
        prompt_tokens=one.prompt_tokens,
        logprobs=token_logprobs(one.emitted, texts),
    )


def token_logprobs(emitted: Sequence[Emitted], texts: Texts) -> Logprobs | None:
    """Return the log-probabilities of new tokens, if they were asked for."""
    if not emitted or emitted[0].logprob is None:
        return None
    return tuple(
        (
            _token_logprob(texts, one.token, one.logprob or 0.0),
            tuple(_token_logprob(texts, *pair) for pair in one.top),
        )
        for one in emitted
    )


def _token_logprob(texts: Texts, number: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(id=number, token=texts.token(number), logprob=logprob)


def model_texts(path: Path, options: SourceOptions, tokenizer: Path | None) -> Texts:
    """Open the tokenizer of a stored model, or the one that the user named.

    Raises:
        AscendRunError: There is none, or it cannot be read.
    """
    if recognised(path, options.step) is not Format.ASCEND_RUN:
        return open_texts(tokenizer, [path], None)
    config = CheckpointSource.find(path, options.step, options.config).config
    return open_texts(tokenizer, [path, config.parent], config)


def _require_answerable(prompts: Sequence[Sequence[int]], model: GenerationModel) -> None:
    """
    Raises:
        ConfigError: A prompt is empty, too long, or of another vocabulary; lists all.
    """
    problems = []
    vocab_size = model.config.model.vocab_size
    for number, ids in enumerate(prompts, start=1):
        if not ids:
            problems.append(
                f"prompt {number} is empty, and the tokenizer adds no token that begins a text"
            )
        elif len(ids) >= model.max_length:
            problems.append(
                f"prompt {number} has {len(ids)} tokens, and the model's longest text has "
                f"{model.max_length}, with at least one new one; shorten it"
            )
        elif max(ids) >= vocab_size:
            problems.append(
                f"prompt {number} has the token id {max(ids)}, and the model's vocabulary has "
                f"{vocab_size} ids; name the model's own tokenizer with --tokenizer"
            )
    if problems:
        raise ConfigError("these prompts cannot be answered", problems)
