"""Perplexity of token streams.

Windows with a stride as in transformers' guide "Perplexity of fixed-length models"; with a stride
as long as the window they are the samples of ``pretrain``, and the last one is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import ConfigError
from ascend_run.tools.generate.model import GenerationModel

from .results import Perplexity
from .row_scores import Row, row_scores
from .token_streams import TokenStream


@attrs.frozen(kw_only=True)
class WindowOptions:
    """Which tokens the model sees at once. Unit: tokens."""

    window: int | None = None
    """Most tokens before a predicted one; None: the model's longest text."""
    stride: int | None = None
    """Predicted tokens of each window but the first; None: the window."""


def perplexities(
    model: GenerationModel,
    streams: Sequence[TokenStream],
    options: WindowOptions,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Perplexity]:
    """Return the perplexity of each stream: each token but the first is predicted once.

    Raises:
        ConfigError: The window does not suit the model, or ids are beyond its vocabulary; lists
            all problems.
    """
    window, stride = _window(model, options), options.stride
    vocab_size = model.config.model.vocab_size
    problems = [
        f"{stream.name} has the token id {most}, and the model's vocabulary has {vocab_size} ids; "
        "it was made with another tokenizer"
        for stream in streams
        if (most := int(stream.ids.max())) >= vocab_size
    ]
    if problems:
        raise ConfigError("these files cannot be evaluated", problems)
    found = []
    for stream in streams:
        rows = [*windows(stream.ids, window, stride or window)]
        total, done, sums = len(stream.ids) - 1, 0, []
        for row, scores in zip(rows, row_scores(model, rows), strict=True):
            sums.append(float(scores.log_probabilities.sum()))
            done += row.num_scored
            progress(stream.name, done, total)
        found.append(
            Perplexity(
                name=stream.name,
                documents=stream.documents,
                tokens=total,
                loss=-math.fsum(sums) / total,
            )
        )
    return found


def windows(ids: Any, window: int, stride: int) -> Iterator[Row]:
    """Yield rows of at most ``window`` input tokens that together score each id but the first."""
    begin = scored = 0
    while scored < len(ids) - 1:
        end = min(begin + window, len(ids) - 1)
        yield Row(ids=ids[begin : end + 1], num_scored=end - scored)
        begin, scored = begin + stride, end


def _window(model: GenerationModel, options: WindowOptions) -> int:
    """
    Raises:
        ConfigError: It is longer than the model's longest text, or shorter than the stride.
    """
    window = options.window or model.max_length
    problems = []
    if window > model.max_length:
        problems.append(
            f"--window {window}: the model's longest text has {model.max_length} tokens"
        )
    if (options.stride or 0) > window:
        problems.append(f"--stride {options.stride}: expected at most the window, {window}")
    if problems:
        raise ConfigError("these options cannot be used", problems)
    return window
