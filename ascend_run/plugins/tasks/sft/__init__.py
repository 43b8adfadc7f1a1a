"""Supervised fine-tuning: train on the assistant's turns of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Claim,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.tasks.shared.lengths import length_problems
from ascend_run.plugins.tasks.shared.samples import data_problems, label_problems
from ascend_run.text.sample_options import SampleOptions

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c
    from ascend_run.text.samples import Sample
    from ascend_run.text.task_sources import TaskSources


@attrs.frozen(kw_only=True)
class SftConfig(SampleOptions):
    """Options, set by ``plugins.sft.<field>=<value>``."""

    handler: str = "chat"
    """Data handler that reads the files: ``chat``, ``messages``, ``sharegpt``, ``alpaca``, or any
    installed one that makes conversations."""
    too_long: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "truncate", "turns"))
    )
    """Whether to drop or truncate a conversation of more tokens than ``data.seq_length`` or
    ``model.max_position_embeddings``; ``truncate`` removes its end, ``turns`` the turns that do not
    fit."""
    padding: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "longest", "seq_length"))
    )
    """Length to which a micro-batch is padded; ``auto`` is ``longest`` if the rest of the run
    supports variable lengths, else ``seq_length``."""
    pad_to_multiple_of: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """With ``longest``: round lengths up to a multiple of this. Unit: tokens."""
    train_on_inputs: bool = False
    """Train every token, those of system, user and tools too; otherwise the assistant's turns."""
    mask_history: bool = False
    """Train the last turn of the assistant only; otherwise all of its turns."""
    packing: bool = False
    """Pack several conversations into each sample, without attention between them."""
    bidirectional_prompt: bool = False
    """Let the tokens of a prompt, before the first trained one, attend to one another (a prefix
    language model); otherwise attention is causal."""

    def sources(self, task: str, kind: type[Sample]) -> TaskSources:
        """Return what reads the task's samples."""
        return attrs.evolve(
            super().sources(task, kind),
            train_on_inputs=self.train_on_inputs,
            mask_history=self.mask_history,
        )


class Sft:
    """Train on the mean cross-entropy of the assistant's tokens over the global batch.

    A sample is one conversation, or several with packing; there is no attention between
    conversations. Trained tokens are selected by their position in the rendered text.

    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.
    """

    manifest = Manifest(
        name="sft",
        summary="fine-tune on conversations; the loss covers the assistant's turns",
        # Its samples come from its own files, so no other plugin may provide the dataset.
        claims=(Claim.DATASET, Claim.DOCUMENTS),
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
            LegacyFlag(flag="--stage", key="task", values={"sft": "sft"}),
            LegacyFlag(flag="--is-instruction-dataset", key="task", values={"": "sft"}),
            LegacyFlag(flag="--prompt-type", key="plugins.sft.template", values=None),
            LegacyFlag(
                flag="--variable-seq-lengths",
                key="plugins.sft.padding",
                values={"": "auto", None: "seq_length"},
            ),
            LegacyFlag(
                flag="--pad-to-multiple-of", key="plugins.sft.pad_to_multiple_of", values=None
            ),
        ),
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
        from ascend_run.text.samples import Conversation

        return [
            *label_problems("sft", config),
            *length_problems("sft", config, packs=self.config.packing),
            *data_problems("sft", config, "conversations"),
            *_option_problems(config, self.config),
            *self.config.sources("sft", Conversation).problems(config),
        ]

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the cost of a dense mask; without one, the cost is the model's own."""
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
        from .padding import add_document_ends, shorten, show_prompts

        def wrap(batches: c.BatchIterator) -> c.BatchIterator:
            if pads_to_longest(config, self.config):
                batches = shorten(batches, config, self.config.pad_to_multiple_of)
            if self.config.packing:
                batches = add_document_ends(batches)
            return show_prompts(batches) if self.config.bidirectional_prompt else batches

        return wrap


_NOT_WITH_INPUTS: Final = {
    "mask_history=true": "only those of the last turn",
    "too_long=turns": "cuts where a turn ends that is trained beside ones that are not",
    "bidirectional_prompt=true": "lets the untrained tokens of a prompt attend to later ones",
}
"""What does not go with ``train_on_inputs``, and why."""


def pads_to_longest(config: RunConfig, options: SftConfig) -> bool:
    """Return whether micro-batches may differ in length."""
    if options.padding != "auto":
        return options.padding == "longest"
    return not any(_needs_one_length(config))


def _needs_one_length(config: RunConfig) -> Iterator[str]:
    """Yield the settings of a run that need micro-batches of one length."""
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
    if (scaling := config.model.rope_scaling_type) in ("dynamic", "longrope"):
        yield (
            f"model.rope_scaling_type={scaling}: RoPE angles depend on the length of a "
            "micro-batch, so they would depend on how a batch is split"
        )
    parallel, seq_length = config.parallel, config.data.seq_length
    tensors = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    parts = parallel.context_parallel_size * tensors
    if seq_length % parts:
        yield (
            f"data.seq_length={seq_length}: {parts} ranks hold unequal parts, which do not "
            "determine the length of a shorter sequence"
        )


def _option_problems(config: RunConfig, options: SftConfig) -> Iterator[str]:
    """Yield the problems of the options, before any file is opened."""
    if options.bidirectional_prompt and config.model.window_size:
        yield (
            "sft: plugins.sft.bidirectional_prompt=true does not go with model.window_size="
            f"{config.model.window_size}, which masks every later token; leave out one of "
            "the two"
        )
    if options.train_on_inputs:
        for other, why in _NOT_WITH_INPUTS.items():
            name, _, value = other.partition("=")
            if str(getattr(options, name)).lower() == value:
                yield (
                    f"sft: plugins.sft.train_on_inputs=true trains every token, and "
                    f"plugins.sft.{other} {why}; leave out one of the two"
                )
    if options.padding == "longest":
        for reason in _needs_one_length(config):
            yield f"sft: plugins.sft.padding=longest does not go with {reason}; use seq_length"
