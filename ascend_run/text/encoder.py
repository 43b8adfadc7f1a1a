"""Conversations to labelled token ids, in batches, with what is left out and why. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import attrs

from ascend_run.plugin_api import DataError

from .chat_tokenizer import ChatTokenizer
from .labelling import Labelled, label, without_doubled
from .omissions import Omissions
from .samples import Conversation, Message, Prompt, VerifiablePrompt, texts
from .sources.problems import SHOWN_PROBLEMS
from .templates import BEGIN, END, MARK, ChatTemplate, TemplateRefusal
from .tool_calls import calls_as_text
from .turn_weights import weighted, without_weights
from .turns import Rendered, render

_BATCH: Final = 512
"""Samples tokenized per call."""
_BATCHES_AT_ONCE: Final = 2

NOTHING_TO_TRAIN: Final = "nothing to train on"
SPELLS_SPECIAL: Final = "spells a special token"

S = TypeVar("S")
T = TypeVar("T")


@attrs.frozen
class LeftOut:
    """A sample is left out, for this reason."""

    reason: str


Result: TypeAlias = T | LeftOut | TemplateRefusal
"""What encoding makes of one sample; a refusal is an error of the data."""
EncodedBatches: TypeAlias = Iterator[tuple[Sequence[str], Sequence[Result[T]]]]
"""The sources and the results of each batch."""


@attrs.frozen(kw_only=True)
class Encoder:
    """Renders, tokenizes and labels conversations."""

    tokenizer: ChatTokenizer
    template: ChatTemplate
    keeps_special: bool
    """Whether text may spell a special token, which is then encoded as that token."""
    train_on_inputs: bool = False
    """Train what is between the assistant's turns too."""
    mask_history: bool = False
    """Train the last turn of the assistant only."""

    def description(self) -> Mapping[str, object]:
        """Return everything that determines the token ids, as JSON values."""
        return {
            "tokenizer": self.tokenizer.sha256,
            "variables": dict(self.tokenizer.variables),
            "template": self.template.source,
            "date": self.template.date,
            "keeps_special": self.keeps_special,
            "train_on_inputs": self.train_on_inputs,
            "mask_history": self.mask_history,
        }

    def label(
        self, conversations: Sequence[Conversation], *, only_last: bool = False
    ) -> list[Result[Labelled]]:
        """Return the labelled ids of each conversation.

        Args:
            only_last: Train the last turn of the assistant only, as ``mask_history`` does.
        """
        made = [
            self._attempt(partial(self._rendered, conversation, only_last), conversation.messages)
            for conversation in conversations
        ]
        tokens = iter(
            self.tokenizer.tokens.encode(
                [result.text for result in made if isinstance(result, Rendered)]
            )
        )
        return [
            label(result, next(tokens), self.tokenizer) if isinstance(result, Rendered) else result
            for result in made
        ]

    def _rendered(self, conversation: Conversation, only_last: bool) -> Rendered:
        return weighted(
            render(self.template, self._for_template(conversation)),
            conversation.messages,
            only_last=only_last or self.mask_history,
            with_prompts=self.train_on_inputs,
        )

    def _for_template(self, conversation: Conversation) -> Conversation:
        plain = without_weights(conversation)
        return plain if self.template.renders_calls else calls_as_text(plain)

    def prompt(self, sample: Prompt | VerifiablePrompt) -> Result[list[int]]:
        """Return the ids of messages up to where the assistant would start."""
        messages = self._for_template(Conversation(messages=sample.messages)).messages
        rendering = partial(
            self.template.render, messages, sample.tools, sample.documents, prompt=True
        )
        text = self._attempt(rendering, messages)
        if not isinstance(text, str):
            return text
        ids: list[int] = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        return without_doubled(ids, self.tokenizer.bos_id)

    def answered(
        self, prompt: Sequence[Message], answer: Message, separator: str
    ) -> Result[tuple[list[int], range]]:
        """Return the ids of a conversation that ends with an answer, and the answer's indices.

        Args:
            separator: A text that the answer may have although it spells a special token.
        """
        conversation = Conversation(messages=(*prompt, answer))
        plain = {**answer, "content": answer["content"].replace(separator, "")}
        rendered = self._attempt(partial(render, self.template, conversation), [*prompt, plain])
        if not isinstance(rendered, Rendered):
            return rendered
        (tokens,) = self.tokenizer.tokens.encode([rendered.text])
        if not rendered.spans:
            return LeftOut(NOTHING_TO_TRAIN)
        within = tokens.inside(rendered.spans[-1])
        ids = without_doubled(tokens.ids, self.tokenizer.bos_id)
        extra = len(tokens.ids) - len(ids)
        return ids, range(within.start - extra, within.stop - extra)

    def _attempt(self, make: Callable[[], T], messages: Sequence[Message]) -> Result[T]:
        """Render messages, unless their text must not be in a sample."""
        said = "\0".join(texts(messages))
        if any(mark in said for mark in (BEGIN, END, MARK)):
            return TemplateRefusal("it holds the code points U+10FFF0 to U+10FFF2")
        if not self.keeps_special and self.tokenizer.spells_special.search(said):
            return LeftOut(SPELLS_SPECIAL)
        try:
            return make()
        except TemplateRefusal as refusal:
            return TemplateRefusal(f"{self.template.name} rejects it: {refusal}")


def batches_of(
    samples: Iterable[tuple[str, S]],
) -> Iterator[tuple[Sequence[str], Sequence[S]]]:
    """Yield the sources and the samples of each batch."""
    remaining = iter(samples)
    while batch := [*islice(remaining, _BATCH)]:
        yield [source for source, _ in batch], [sample for _, sample in batch]


def on_threads(
    batches: Iterable[tuple[Sequence[str], Sequence[S]]],
    encode: Callable[[Sequence[S]], Sequence[Result[T]]],
) -> EncodedBatches[T]:
    """Yield the sources and the results of each batch, in order.

    Two batches are in work at a time: one is rendered, which needs the interpreter, while the
    tokenizer encodes the other without it.
    """
    with ThreadPoolExecutor(_BATCHES_AT_ONCE) as threads:
        pending: deque[tuple[Sequence[str], Future[Sequence[Result[T]]]]] = deque()
        for sources, batch in batches:
            pending.append((sources, threads.submit(encode, batch)))
            if len(pending) > _BATCHES_AT_ONCE:
                sources, done = pending.popleft()
                yield sources, done.result()
        for sources, done in pending:
            yield sources, done.result()


def accepted(encoded: EncodedBatches[T], omissions: Omissions) -> Iterator[tuple[str, T]]:
    """Yield what each sample is encoded to, with its source, in order.

    Args:
        omissions: Receives the samples that are left out.

    Raises:
        DataError: Samples are rejected; they are listed, at the end.
    """
    refused: list[str] = []
    for sources, results in encoded:
        for source, result in zip(sources, results, strict=True):
            if isinstance(result, TemplateRefusal):
                refused.append(f"{source}: {result}")
            elif isinstance(result, LeftOut):
                omissions.add(result.reason, source)
            elif not refused:
                yield source, result
    if refused:
        shown = refused[:SHOWN_PROBLEMS]
        if len(refused) > len(shown):
            shown.append(f"{len(refused) - len(shown)} more are rejected")
        raise DataError("these samples cannot be encoded", shown)
