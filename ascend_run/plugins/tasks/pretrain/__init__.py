"""Pretraining: predict the next token of documents concatenated to one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.plugin_api import (
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    Task,
    hookimpl,
)


class Pretrain:
    """Train on the mean next-token cross-entropy over every token that the loss mask counts.

    Documents are concatenated and split to ``data.seq_length``, so attention crosses their
    boundaries. Source: Radford et al. 2019; the samples are those of Megatron's GPTDataset.
    """

    manifest = Manifest(
        name="pretrain",
        summary="pre-train on plain text",
        numerics=Numerics.MODEL,
        # The plugin is device-independent; each level states what has run on that platform.
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
    """Yield what ``[data]`` lacks for this task; core checks the files themselves."""
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
