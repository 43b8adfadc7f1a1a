"""Options that tasks share whose samples are rendered by a chat template. No torch."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from .samples import Sample
    from .task_sources import TaskSources


def iso_date(instance: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    """Validate a date of the options.

    Raises:
        ValueError: It is no date.
    """
    try:
        datetime.date.fromisoformat(value or "2000-01-01")
    except ValueError:
        raise ValueError(
            f"{attribute.name} must be a date such as 2026-01-31, got {value!r}"
        ) from None


@attrs.frozen(kw_only=True)
class SampleOptions:
    """Options of every task whose samples are rendered by a chat template."""

    handler: str
    """Data handler that reads the files."""
    packing: bool
    """Pack as many samples as fit into each row, without attention between them; otherwise a row is
    one sample."""
    template: str | None = None
    """Chat template: a named one such as ``chatml``, or the path of a ``.jinja`` file; default: the
    template in the tokenizer's folder."""
    map_keys: tuple[str, ...] = ()
    """Names of the handler's keys in the files, each ``KEY=NAME`` or a JSON object of them."""
    special_tokens: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "keep"))
    )
    """Whether to drop or keep a sample whose text contains a special token of the tokenizer, which
    would be encoded as that token."""
    shuffle: bool = True
    """Shuffle the samples in every epoch; otherwise keep the order of the files."""
    date: str | None = attrs.field(default=None, validator=iso_date)
    """Date passed to chat templates that request today's date, so that the run does not depend on
    when it starts."""

    def sources(self, task: str, kind: type[Sample]) -> TaskSources:
        """Return what reads the task's samples."""
        from .task_sources import TaskSources

        return TaskSources(
            task=task,
            kind=kind,
            handler=self.handler,
            map_keys=self.map_keys,
            template=self.template,
            date=self.date,
            keeps_special=self.special_tokens == "keep",
        )


@attrs.frozen(kw_only=True)
class PairOptions(SampleOptions):
    """Options of every task that trains on pairs of answers."""

    handler: str = "sharegpt-pairwise"
    """Data handler that reads the files: ``sharegpt-pairwise``, ``alpaca-pairwise``,
    ``preference``, or any installed one that makes preferences."""
    too_long: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "truncate"))
    )
    """Whether to drop a pair of more than ``data.seq_length`` tokens, or one with an answer of more
    than ``model.max_position_embeddings``, or to cut the ends of its answers."""
    equal_answers: str = attrs.field(
        default="refuse", validator=attrs.validators.in_(("refuse", "drop"))
    )
    """Whether to refuse files with pairs whose answers are the same tokens, or to drop such
    pairs."""
    packing: bool = True
    """Pack as many pairs as fit into each sample, without attention between answers; otherwise a
    sample is one pair."""


@attrs.frozen(kw_only=True)
class PreferenceOptions(PairOptions):
    """Options of every loss that prefers the chosen answer of a pair."""

    label_smoothing: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0.0), attrs.validators.le(0.5)]
    )
    """Assumed share of pairs whose answers are swapped, for losses that are log-sigmoids."""
    sft_weight: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))
    """Weight of the mean loss of the chosen answer's tokens, which is added to each pair."""
