"""End-of-document reset: attention and positions restart in each document of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    BatchIterator,
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
    Wrapper,
    hookimpl,
)

from .cost import saved_flops


@attrs.frozen(kw_only=True)
class EodResetConfig:
    """Options, set by ``plugins.eod-reset.<field>=<value>``."""

    reset_attention_mask: bool = True
    """Restrict attention to tokens of the same document."""
    reset_position_ids: bool = True
    """Restart positions at 0 in every document. Only learned position embeddings change: rotary
    embeddings and position biases depend on distances alone."""
    eod_token_id: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(0))
    )
    """Token that ends a document; default: the tokenizer's, or the one recorded beside
    ``data.train``."""
    document_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """End a document after every this many positions, whatever the tokens; default: after each
    end-of-document token. Unit: tokens."""


class EodReset:
    """Compute each document of a pretraining sequence as if it were alone.

    A document ends after each end-of-document token (``ascend-run preprocess --append-eod`` writes
    one after every document), or after a fixed number of tokens. A partial document at the start or
    end of a sequence counts as a document. No mask is materialized: the attention kernel receives
    the document ends, on every rank and pipeline stage. Source: Krell et al. 2021,
    arXiv:2107.02027, section 3.2.
    """

    manifest = Manifest(
        name="eod-reset",
        summary="mask attention between documents that share a sequence",
        small_model_settings={"eod_token_id": 1},
        numerics=Numerics.MODEL,
        claims=(Claim.DOCUMENTS,),
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        attention_needs=AttentionFeatures(documents=True),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--reset-attention-mask"),
            LegacyFlag(
                flag="--reset-attention-mask",
                key="plugins.eod-reset.reset_attention_mask",
                values={"": True, None: False},
            ),
            LegacyFlag(flag="--reset-position-ids"),
            LegacyFlag(
                flag="--reset-position-ids",
                key="plugins.eod-reset.reset_position_ids",
                values={"": True, None: False},
            ),
            LegacyFlag(
                flag="--fix-sub-seq-length", key="plugins.eod-reset.document_length", values=None
            ),
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
                f"eod-reset: plugins.eod-reset.eod_token_id={options.eod_token_id} is not a "
                f"token id; model.vocab_size is {vocab_size}"
            )
        if every is not None and options.eod_token_id is not None:
            problems.append(
                f"eod-reset: plugins.eod-reset.document_length={every} ends documents at any "
                f"token; leave out plugins.eod-reset.eod_token_id={options.eod_token_id}, "
                "or document_length"
            )
        if every is not None and every >= config.data.seq_length:
            problems.append(
                f"eod-reset: plugins.eod-reset.document_length={every} leaves every sequence of "
                f"data.seq_length={config.data.seq_length} one document; use less, or leave "
                "the plugin out"
            )
        if not options.reset_attention_mask and not options.reset_position_ids:
            problems.append(
                "eod-reset: reset_attention_mask and reset_position_ids are both false, so it "
                "changes nothing; leave the plugin out"
            )
        return problems

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the saved FLOPs for a fixed document length.

        Returns None if documents end at tokens: the cost model does not read the data.
        """
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
