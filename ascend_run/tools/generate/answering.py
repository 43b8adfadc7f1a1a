"""Answer prompts with a stored model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from ascend_run.ops.generation.engine import Engine, Finish, Request
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.formats.run_checkpoints import CheckpointSource
from ascend_run.tools.convert.opening import Format, recognised
from ascend_run.tools.convert.source_options import SourceOptions

from .model import GenerationModel, loaded_model
from .texts import Texts, open_texts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_MAX_SEQUENCES = 16


@attrs.frozen(kw_only=True)
class Question:
    """What a user asks for."""

    model: Path
    options: SourceOptions
    tokenizer: Path | None
    dtype: str | None
    prompts: Sequence[str]
    max_new_tokens: int


@attrs.frozen(kw_only=True)
class Answer:
    """What follows one prompt."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    """The new ids, with the one that ended the text."""
    finish: Finish
    prompt_tokens: int

    @property
    def new_tokens(self) -> int:
        return len(self.ids)


def answers(question: Question) -> list[Answer]:
    """Answer prompts as one batch; the answers are in their order.

    Raises:
        AscendRunError: The model or its tokenizer cannot be read, or a prompt cannot be answered.
    """
    texts = _texts(question)
    prompts = [texts.ids(prompt) for prompt in question.prompts]
    with loaded_model(
        question.model, question.options, None if question.dtype is None else DTYPES[question.dtype]
    ) as model:
        _require_answerable(prompts, model)
        requests = [
            Request(
                prompt=ids,
                max_new_tokens=min(question.max_new_tokens, model.max_length - len(ids)),
                end_ids=texts.end_ids,
            )
            for ids in prompts
        ]
        found = _continuations(model, requests)
    return [
        Answer(
            prompt=prompt,
            text=texts.continuation(ids, new),
            ids=tuple(new),
            finish=finish,
            prompt_tokens=len(ids),
        )
        for prompt, ids, (new, finish) in zip(question.prompts, prompts, found, strict=True)
    ]


def _texts(question: Question) -> Texts:
    path, options = question.model, question.options
    if recognised(path, options.step) is not Format.ASCEND_RUN:
        return open_texts(question.tokenizer, [path], None)
    config = CheckpointSource.find(path, options.step, options.config).config
    return open_texts(question.tokenizer, [path, config.parent], config)


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


def _continuations(
    model: GenerationModel, requests: Sequence[Request]
) -> list[tuple[list[int], Finish]]:
    """Return the new ids of each request, and why they end."""
    longest = sorted((request.num_stored for request in requests), reverse=True)
    page_size = 16
    num_tokens = sum(-(-tokens // page_size) * page_size for tokens in longest[:_MAX_SEQUENCES])
    engine: Engine = model.engine(num_tokens, max_sequences=_MAX_SEQUENCES)
    numbers = [engine.submit(request) for request in requests]
    new: dict[int, list[int]] = {number: [] for number in numbers}
    finishes: dict[int, Finish] = {}
    while not engine.is_idle:
        for one in engine.step():
            new[one.sequence].append(one.token)
            if one.finish is not None:
                finishes[one.sequence] = one.finish
    return [(new[number], finishes[number]) for number in numbers]
