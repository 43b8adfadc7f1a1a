"""Pre-training: predict the next token of documents joined to one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.plugin_api import (
    Claim,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    Task,
    hookimpl,
)


class Pretrain:
    """The loss is the mean cross-entropy of the next token, over every token that counts.

    Documents are joined and cut to ``data.seq_length``, so attention crosses their borders.
    Source: Radford et al. 2019; the samples are those of Megatron's GPTDataset.
    """

    manifest = Manifest(
        name="pretrain",
        summary="train on plain text, document after document",
        claims=(Claim.TASK,),
        numerics=Numerics.MODEL,
        # Nothing here knows a device; what has run on one is said all the same.
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=0,
        maturity=Maturity.BETA,
    )

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(_data_problems(config))

    @hookimpl
    def ascend_task(self) -> Task:
        from .task import PretrainTask

        return PretrainTask()


def _data_problems(config: RunConfig) -> Iterator[str]:
    """What ``[data]`` lacks for this task; the files themselves are checked by core."""
    data = config.data
    if not data.train and config.train.train_iters:
        yield (
            "pretrain: data.train is empty; name the prefix of a dataset, as in "
            "data.train=data/demo/train (ascend-run preprocess makes one)"
        )
    if config.train.eval_interval and not data.validation:
        yield (
            f"pretrain: train.eval_interval is {config.train.eval_interval}, but data.validation "
            "is empty; name a held-out dataset, or set train.eval_interval=0"
        )
