"""Pretraining: predict the next token of documents concatenated to one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ascend_run.plugin_api import (
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    Task,
    hookimpl,
)
from ascend_run.plugins.tasks.shared.samples import label_problems


@attrs.frozen(kw_only=True)
class PretrainConfig:
    """Options, set by ``plugins.pretrain.<field>=<value>``; for text that is read itself."""

    format: str = attrs.field(
        default="auto",
        validator=attrs.validators.in_(("auto", "jsonl", "records", "text", "python")),
    )
    """Format of the files; ``auto``: by suffix. In a folder, JSON arrays and tables are read with
    ``records`` only."""
    map_keys: tuple[str, ...] = ()
    """Name of the key ``text`` in the files, as in ``["text=body"]``."""
    append_eod: bool = True
    """Append the end-of-document token to every document."""
    end_token: str | None = None
    """End-of-document token; default: the tokenizer's, if known."""


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
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=0,
        maturity=Maturity.BETA,
        legacy_flags=(
            # The loss of every task is fused with the output layer.
            LegacyFlag(flag="--cross-entropy-loss-fusion", key="", values={}),
            LegacyFlag(flag="--cross-entropy-fusion-impl", key="", values={}),
        ),
    )
    config_class = PretrainConfig

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        from ascend_run.text.dataset_paths import is_source

        problems = [*label_problems("pretrain", config), *_data_problems(config)]
        if any(map(is_source, (*config.data.train, *config.data.validation))):
            from .sources import source_problems  # imports the readers of text

            problems += [f"pretrain: {p}" for p in source_problems(config, self.config)]
        return problems

    @hookimpl
    def ascend_task(self) -> Task:
        from .task import PretrainTask

        return PretrainTask(self.config)


def _data_problems(config: RunConfig) -> Iterator[str]:
    """Yield what ``[data]`` lacks for this task; core checks token files."""
    data = config.data
    if not data.train and config.train.train_iters:
        yield (
            "pretrain: data.train is empty; name the prefix of a dataset, as in "
            "data.train=data/demo/train (ascend-run preprocess makes one), or a file of text"
        )
    if config.train.eval_interval and not data.validation:
        yield (
            f"pretrain: train.eval_interval is {config.train.eval_interval}, but data.validation "
            "is empty; name a held-out dataset, or set train.eval_interval=0"
        )
