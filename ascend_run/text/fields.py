"""The fields of each type of sample as token ids: what its token files hold. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

from ascend_run.plugin_api import ConfigError

from .chat_tokenizer import ChatTokenizer
from .encoder import NOTHING_TO_TRAIN, Encoder, LeftOut, Result
from .labelling import Labelled
from .preferences import SIDES, Pair, label_pairs
from .samples import (
    Conversation,
    Preference,
    ProcessReward,
    Prompt,
    Sample,
    VerifiablePrompt,
)
from .templates import TemplateRefusal

UNTRAINED: Final = -100
"""Label of a position that is not trained, as in transformers."""

Fields: TypeAlias = Mapping[str, Sequence[int]]
"""Name of a field -> its ids. Labels are not shifted: each is at the position of its token."""

EncodeFields: TypeAlias = Callable[[Sequence[Any]], list[Result[Fields]]]
"""Encodes a batch of samples."""

_PAIR: Final = ("input_ids", "labels")
FIELDS: Final[Mapping[type[Sample], tuple[str, ...]]] = {
    Conversation: _PAIR,
    Preference: tuple(f"{side}_{name}" for side in SIDES for name in _PAIR),
    ProcessReward: _PAIR,
    Prompt: ("input_ids",),
    VerifiablePrompt: _PAIR,
}
"""Type of sample -> its fields. The labels of a VerifiablePrompt are its answer."""


@attrs.frozen(kw_only=True)
class RewardTokens:
    """Tokens of process rewards."""

    placeholder: int
    placeholder_text: str
    ids: Mapping[str, int]
    """Rating -> its token."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, placeholder: str, rewards: Sequence[str]) -> RewardTokens:
        """Return the tokens of a placeholder and of ratings.

        Raises:
            ConfigError: A text is not one token; lists all problems.
        """
        found: dict[str, int] = {}
        problems = []
        for text in (placeholder, *rewards):
            ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
            # At the start of a text, a symbol of a SentencePiece model follows the dummy prefix.
            if len(ids) == 1 or ids[-1:] == [tokenizer.backend.token_to_id(text)]:
                found[text] = ids[-1]
            else:
                problems.append(f"{text!r} is {len(ids)} tokens; it must be one")
        if problems:
            raise ConfigError("process rewards need single tokens", problems)
        return cls(
            placeholder=found[placeholder],
            placeholder_text=placeholder,
            ids={text: found[text] for text in rewards},
        )


def field_encoder(
    kind: type[Sample],
    encoder: Encoder,
    rewards: RewardTokens | None = None,
    *,
    drops_equal: bool = False,
) -> EncodeFields:
    """Return what encodes a batch of samples of one type.

    Args:
        rewards: For ProcessReward only, which needs them.
        drops_equal: Of Preference: leave pairs with equal answers out, in place of a refusal.
    """
    if kind is Conversation:
        return lambda batch: [_trained(result) for result in encoder.label(batch)]
    if kind is Preference:
        label = partial(label_pairs, encoder=encoder, drops_equal=drops_equal)
        return lambda batch: [_preference(result) for result in label(batch)]
    if kind is ProcessReward:
        assert rewards is not None
        return lambda batch: [_process_reward(sample, encoder, rewards) for sample in batch]
    if kind is Prompt:
        return lambda batch: [_prompt(sample, encoder) for sample in batch]
    assert kind is VerifiablePrompt
    return lambda batch: [_verifiable(sample, encoder) for sample in batch]


def _trained(result: Result[Labelled]) -> Result[Fields]:
    if not isinstance(result, Labelled):
        return result
    # The first token is never a label.
    if not any(result.trained[1:]):
        return LeftOut(NOTHING_TO_TRAIN)
    if others := sorted({*result.trained} - {0.0, 1.0}):
        return TemplateRefusal(
            f"a turn has the weight {others[0]}, and token files hold 0 or 1; round it, or name "
            "the source itself in data.train"
        )
    return _fields(result)


def _fields(labelled: Labelled) -> Fields:
    return {
        "input_ids": labelled.ids,
        "labels": [
            number if counts else UNTRAINED
            for number, counts in zip(labelled.ids, labelled.trained, strict=True)
        ],
    }


def _preference(result: Result[Pair]) -> Result[Fields]:
    if isinstance(result, LeftOut | TemplateRefusal):
        return result
    return {
        f"{side}_{name}": ids
        for side, labelled in zip(SIDES, result, strict=True)
        for name, ids in _fields(labelled).items()
    }


def _process_reward(
    sample: ProcessReward, encoder: Encoder, rewards: RewardTokens
) -> Result[Fields]:
    unknown = sorted({*sample.rewards} - rewards.ids.keys())
    if unknown:
        return TemplateRefusal(
            f"its ratings {', '.join(map(repr, unknown))} are none of {', '.join(rewards.ids)}"
        )
    if sample.prompt:
        solution = {"role": "assistant", "content": sample.text}
        answered = encoder.answered(sample.prompt, solution, rewards.placeholder_text)
        if isinstance(answered, LeftOut | TemplateRefusal):
            return answered
        ids, within = answered
    else:
        ids = encoder.tokenizer.backend.encode(sample.text, add_special_tokens=True).ids
        within = range(len(ids))
    places = [index for index in within if ids[index] == rewards.placeholder]
    if len(places) != len(sample.rewards):
        return TemplateRefusal(
            f"it has {len(places)} placeholders and {len(sample.rewards)} ratings; each step needs "
            "one of both"
        )
    labels = [UNTRAINED] * len(ids)
    for place, reward in zip(places, sample.rewards, strict=True):
        labels[place] = rewards.ids[reward]
    return {"input_ids": ids, "labels": labels}


def _prompt(sample: Prompt | VerifiablePrompt, encoder: Encoder) -> Result[Fields]:
    ids = encoder.prompt(sample)
    return {"input_ids": ids} if isinstance(ids, list) else ids


def _verifiable(sample: VerifiablePrompt, encoder: Encoder) -> Result[Fields]:
    fields = _prompt(sample, encoder)
    if isinstance(fields, LeftOut | TemplateRefusal):
        return fields
    answer = encoder.tokenizer.backend.encode(sample.answer, add_special_tokens=False).ids
    return {**fields, "labels": answer}
