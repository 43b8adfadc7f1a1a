"""Pre-training in which the first tokens of a sequence are context alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ascend_run.plugin_api import (
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    Task,
    hookimpl,
)


@attrs.frozen(kw_only=True)
class ContextPretrainConfig:
    """Options, set by ``plugins.context-pretrain.<field>=<value>``."""

    context_tokens: int = attrs.field(default=4, validator=attrs.validators.ge(0))
    """Tokens at the beginning of each sequence that are read and not trained; 0 trains all. Unit:
    tokens."""


class ContextPretrain:
    """The loss is the mean cross-entropy of the next token, over the tokens behind the context.

    Numerics: another loss, by design; without context that of plain pre-training, bit for bit.
    """

    manifest = Manifest(
        name="context-pretrain",
        summary="pre-train with the first tokens of each sequence as context alone",
        numerics=Numerics.MODEL,
        # Nothing here knows a device; what has run on one is said all the same.
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )
    config_class = ContextPretrainConfig

    def __init__(self, config: ContextPretrainConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(_problems(config, self.config.context_tokens))

    @hookimpl
    def ascend_task(self) -> Task:
        from .task import ContextPretrainTask

        return ContextPretrainTask(self.config.context_tokens)


def _problems(config: RunConfig, context_tokens: int) -> Iterator[str]:
    data = config.data
    if context_tokens >= data.seq_length:
        yield (
            f"context-pretrain: plugins.context-pretrain.context_tokens={context_tokens} leaves "
            f"nothing to train of data.seq_length={data.seq_length}; use at most "
            f"{data.seq_length - 1}"
        )
    if not data.train and config.train.train_iters:
        yield (
            "context-pretrain: data.train is empty; name the prefix of a dataset, as in "
            "data.train=data/train (ascend-run preprocess makes one)"
        )
    if (interval := config.train.eval_interval) and not data.validation:
        yield (
            f"context-pretrain: train.eval_interval is {interval}, but data.validation is empty; "
            "name a held-out dataset, or set train.eval_interval=0"
        )
