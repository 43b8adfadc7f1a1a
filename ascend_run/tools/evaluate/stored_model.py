"""A stored model that answers prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.ops.generation.engine import Request, cache_tokens
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.plugin_api import ConfigError
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.templates import ChatTemplate
from ascend_run.tools.generate.model import GenerationModel
from ascend_run.tools.generate.session import Session
from ascend_run.tools.generate.texts import Texts

from .prompts import Prompt
from .row_scores import Row, row_scores

_MAX_SEQUENCES: Final = 16
_PAIRS: Final = 256
"""Whose ids are held at a time."""


def chat_template(tokenizer: Path) -> ChatTemplate:
    """Return the chat template beside a tokenizer.

    Raises:
        DataError: There is none, or it cannot be used.
    """
    options = ChatOptions(
        tokenizer=tokenizer,
        tokenizer_option="--tokenizer",
        template_option="--tokenizer",
        date_option="the template",
    )
    return open_chat(options)[1]


@attrs.frozen(kw_only=True, eq=False)
class StoredModel:
    """An ``AnsweringModel``."""

    model: GenerationModel
    texts: Texts
    template: ChatTemplate | None = None
    """Of prompts that are turns of a chat."""

    def fits(self, prompt: Prompt, num_new: int) -> bool:
        """Whether so many tokens can follow the prompt in the model's longest text.

        Raises:
            ConfigError: The prompt is empty, or has ids beyond the model's vocabulary.
        """
        ids = self._ids(prompt)
        vocab_size = self.model.config.model.vocab_size
        if not ids:
            raise ConfigError("a prompt is empty, and the tokenizer adds no token to it")
        if max(ids) >= vocab_size:
            raise ConfigError(
                f"a prompt has the token id {max(ids)}, and the model's vocabulary has "
                f"{vocab_size} ids; name the model's own tokenizer with --tokenizer"
            )
        return len(ids) + num_new <= self.model.max_length

    def answers(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Yield what follows each prompt, in order; in continuous batches."""
        requests = [
            Request(
                prompt=self._ids(prompt),
                max_new_tokens=max_new_tokens,
                end_ids=self.texts.end_ids,
                sampling=Sampling() if sampling is None else sampling.of_prompt(index),
            )
            for index, prompt in enumerate(prompts)
        ]
        num_tokens = cache_tokens(requests, _MAX_SEQUENCES)
        engine = self.model.engine(num_tokens, max_sequences=_MAX_SEQUENCES)
        session = Session(engine, self.texts)
        numbers = [session.submit(one, stop) for one in requests]
        found, ended = dict.fromkeys(numbers, ""), set[int]()
        for number in numbers:
            while number not in ended:
                for piece in session.step():
                    found[piece.emitted.sequence] += piece.text
                    if piece.finish is not None:
                        ended.add(piece.emitted.sequence)
            yield found.pop(number)

    def log_probabilities(self, pairs: Sequence[tuple[Prompt, str]]) -> Iterator[float]:
        """Yield the log-probability of each text after its prompt: the sum over its tokens.

        Prompt and text are encoded together; the tokens after as many as the prompt has alone are
        those of the text, as in lm-evaluation-harness.
        """
        for begin in range(0, len(pairs), _PAIRS):
            rows = [self._row(*pair) for pair in pairs[begin : begin + _PAIRS]]
            for scores in row_scores(self.model, rows):
                yield float(scores.log_probabilities.sum())

    def _row(self, prompt: Prompt, text: str) -> Row:
        ids = self._ids(prompt, text)
        return Row(ids=ids, num_scored=max(1, len(ids) - len(self._ids(prompt))))

    def _ids(self, prompt: Prompt, text: str = "") -> tuple[int, ...]:
        if not prompt.turns:
            return self.texts.ids(prompt.text + text)
        assert self.template is not None
        roles = ("user", "assistant")
        messages = [
            {"role": roles[at % 2], "content": turn} for at, turn in enumerate(prompt.turns)
        ]
        rendered = self.template.render(messages, prompt=True)
        backend = self.texts.tokenizer.backend
        # The template writes the tokens that begin a text.
        return tuple(backend.encode(rendered + text, add_special_tokens=False).ids)
