"""Supervised fine-tuning: train on what the assistant says in conversations."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Claim,
    CostChange,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


def _iso_date(instance: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    try:
        datetime.date.fromisoformat(value or "2000-01-01")
    except ValueError:
        raise ValueError(
            f"{attribute.name} must be a date such as 2026-01-31, got {value!r}"
        ) from None


@attrs.frozen(kw_only=True)
class SftConfig:
    """Options, set by ``plugins.sft.<field>=<value>``."""

    template: str | None = None
    """How a conversation becomes text: ``alpaca``, ``chatml``, ``vicuna``, or the path of a
    ``.jinja`` file; default: the chat template in the tokenizer's folder."""
    too_long: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "truncate"))
    )
    """What becomes of a conversation of more than ``data.seq_length`` tokens; ``truncate`` cuts its
    end off."""
    special_tokens: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "keep"))
    )
    """What becomes of a conversation whose text spells a special token of the tokenizer, which
    would be read as that token."""
    padding: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "longest", "seq_length"))
    )
    """To which length a micro-batch is padded; ``auto`` is ``longest`` where every part of the run
    takes any length, else ``seq_length``."""
    pad_to_multiple_of: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """With ``longest``: lengths are rounded up to a multiple of this. Unit: tokens."""
    packing: bool = False
    """Fill each sample with several conversations, none of which sees another."""
    bidirectional_prompt: bool = False
    """The tokens of a prompt, before the first that is trained, see one another (a prefix language
    model); else each sees those before it."""
    shuffle: bool = True
    """Train in another order in every epoch; else in the order of the files."""
    date: str | None = attrs.field(default=None, validator=_iso_date)
    """The day that a chat template which asks for today's date is told, so that a run does not
    depend on when it is made."""


class Sft:
    """The loss is the mean cross-entropy of the assistant's tokens over the global batch.

    One sample is one conversation, or with packing several; none sees another. Which tokens are
    trained is decided by their position in the rendered text.

    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.
    """

    manifest = Manifest(
        name="sft",
        summary="fine-tune on conversations, training what the assistant says",
        # Its samples come from its own files, so nobody else may store tokens.
        claims=(Claim.TASK, Claim.DATASET),
        numerics=Numerics.MODEL,
        # Nothing here knows a device; what has run on one is said all the same.
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=0,
        maturity=Maturity.BETA,
        legacy_flags=("--stage sft", "--is-instruction-dataset", "--prompt-type"),
        source="arXiv:2203.02155",
    )
    config_class = SftConfig

    def __init__(self, config: SftConfig) -> None:
        self.config = config
        if config.bidirectional_prompt:
            self.manifest = attrs.evolve(
                type(self).manifest, attention_needs=AttentionFeatures(bias=True)
            )

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        from .sources import source_problems

        return [*_option_problems(config, self.config), *source_problems(config, self.config)]

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        """That of conversations is the model's own."""
        if not self.config.bidirectional_prompt:
            return None
        from .cost import dense_mask_cost

        return dense_mask_cost(config, layout, rank, packing=self.config.packing)

    @hookimpl
    def ascend_task(self) -> c.Task:
        from .task import SftTask

        return SftTask(self.config)

    @hookimpl
    def ascend_batch(self, config: RunConfig) -> c.Wrapper[c.BatchIterator]:
        from .padding import shorten, show_prompts, tell_documents

        def wrap(batches: c.BatchIterator) -> c.BatchIterator:
            if pads_to_longest(config, self.config):
                batches = shorten(batches, config, self.config.pad_to_multiple_of)
            if self.config.packing:
                batches = tell_documents(batches)
            return show_prompts(batches) if self.config.bidirectional_prompt else batches

        return wrap


def pads_to_longest(config: RunConfig, options: SftConfig) -> bool:
    """Whether micro-batches may differ in length."""
    if options.padding != "auto":
        return options.padding == "longest"
    return not any(_needs_one_length(config))


def _needs_one_length(config: RunConfig) -> Iterator[str]:
    """The parts of a run for which padding is more than what nobody looks at."""
    if config.parallel.pipeline_model_parallel_size > 1:
        yield (
            "parallel.pipeline_model_parallel_size="
            f"{config.parallel.pipeline_model_parallel_size}: pipeline stages exchange tensors of "
            "one shape"
        )
    if config.model.num_moe_experts:
        yield (
            f"model.num_moe_experts={config.model.num_moe_experts}: padding is routed too, so the "
            "load-balancing loss would depend on how a batch is split"
        )
    if (scaling := config.model.get("rope_scaling_type")) in ("dynamic", "longrope"):
        yield (
            f"model.rope_scaling_type={scaling}: angles follow the length of a micro-batch, so "
            "they would depend on how a batch is split"
        )
    parallel, seq_length = config.parallel, config.data.seq_length
    tensors = parallel.tensor_model_parallel_size if parallel.get("sequence_parallel") else 1
    parts = parallel.get("context_parallel_size", 1) * tensors
    if seq_length % parts:
        yield (
            f"data.seq_length={seq_length}: {parts} ranks hold unequal parts of it, by which they "
            "cannot tell how long a shorter one is"
        )


def _option_problems(config: RunConfig, options: SftConfig) -> Iterator[str]:
    """What is wrong with the options, before any file is opened."""
    data = config.data
    if not data.train and config.train.train_iters:
        yield (
            "sft: data.train is empty; name JSON-lines files of conversations, as in "
            "data.train=data/train.jsonl"
        )
    if config.train.eval_interval and not data.validation:
        yield (
            f"sft: train.eval_interval is {config.train.eval_interval}, but data.validation is "
            "empty; name a held-out file, or set train.eval_interval=0"
        )
    if options.bidirectional_prompt and config.model.get("window_size"):
        yield (
            "sft: plugins.sft.bidirectional_prompt=true does not go with model.window_size="
            f"{config.model.window_size}, which hides what comes after a token; leave out one of "
            "the two"
        )
    if options.padding == "longest":
        for reason in _needs_one_length(config):
            yield f"sft: plugins.sft.padding=longest does not go with {reason}; use seq_length"
