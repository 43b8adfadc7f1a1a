"""End-of-document reset: documents that share a sequence do not see one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    BatchIterator,
    CostChange,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    RankKind,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import saved_flops


@attrs.frozen(kw_only=True)
class EodResetConfig:
    """Options, set by ``plugins.eod-reset.<field>=<value>``."""

    reset_attention_mask: bool = True
    """Attention stays within a document."""
    reset_position_ids: bool = True
    """Positions begin at 0 in every document; for learned ones, since rotary angles and biases of
    positions only know distances."""
    eod_token_id: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(0))
    )
    """The token that ends a document; default: the tokenizer's, or what the record beside
    ``data.train`` says."""
    document_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Documents end after every so many positions of a sequence, whatever their tokens; default:
    behind each end-of-document token. Unit: tokens."""


class EodReset:
    """A document of a pretraining sequence is computed as if it were alone.

    Documents end behind each end-of-document token (``ascend-run preprocess --append-eod`` writes
    one behind every document), or after a fixed number of tokens. Where a sequence begins or ends
    within one, that part of it is a document. Nobody holds a mask: the attention kernel is given
    where documents end, on every rank and pipeline stage.
    Source: Krell et al. 2021, arXiv:2107.02027, section 3.2.
    """

    manifest = Manifest(
        name="eod-reset",
        summary="documents that share a sequence do not see one another",
        numerics=Numerics.MODEL,
        conflicts={
            "sft": "its samples are conversations; plugins.sft.packing=true keeps those apart",
        },
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention_needs=AttentionFeatures(documents=True),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            "--reset-attention-mask",
            "--reset-position-ids",
            "--fix-sub-seq-length",
        ),
        source="arXiv:2107.02027; Megatron's reset_attention_mask and reset_position_ids",
    )
    config_class = EodResetConfig

    def __init__(self, config: EodResetConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        options, problems = self.config, []
        every = options.document_length
        vocab_size = config.model.vocab_size
        if options.eod_token_id is not None and options.eod_token_id >= vocab_size:
            problems.append(
                f"eod-reset: plugins.eod-reset.eod_token_id={options.eod_token_id} is no token; "
                f"model.vocab_size is {vocab_size}"
            )
        if every is not None and options.eod_token_id is not None:
            problems.append(
                f"eod-reset: plugins.eod-reset.document_length={every} ends documents whatever "
                f"their tokens; leave out plugins.eod-reset.eod_token_id={options.eod_token_id}, "
                "or document_length"
            )
        if every is not None and every >= config.data.seq_length:
            problems.append(
                f"eod-reset: plugins.eod-reset.document_length={every} leaves every sequence of "
                f"data.seq_length={config.data.seq_length} one document; choose less, or leave "
                "the plugin out"
            )
        if not options.reset_attention_mask and not options.reset_position_ids:
            problems.append(
                "eod-reset: reset_attention_mask and reset_position_ids are both false, so it "
                "changes nothing; leave the plugin out"
            )
        return problems

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        """Where documents end by their tokens, a plan cannot know it: it does not read the data."""
        every = self.config.document_length
        if every is None or not self.config.reset_attention_mask:
            return None
        return CostChange(flops=-saved_flops(config, layout, rank, every))

    @hookimpl
    def ascend_batch(self, end_of_document: Callable[[], int]) -> Wrapper[BatchIterator]:
        from .documents import after_token, every, reset

        def wrap(batches: BatchIterator) -> BatchIterator:
            length, token = self.config.document_length, self.config.eod_token_id
            if length is not None:
                return reset(batches, every(length), self.config)
            return reset(
                batches, after_token(end_of_document() if token is None else token), self.config
            )

        return wrap
