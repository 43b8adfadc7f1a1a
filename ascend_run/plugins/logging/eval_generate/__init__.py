"""Texts that the model writes while it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Claim,
    Manifest,
    Maturity,
    Numerics,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    Wrapper,
    hookimpl,
)

from .prompts import PromptOptions, read_prompts
from .sample_file import FILE_NAME, SampleFile

if TYPE_CHECKING:
    from ascend_run.ops.generation.cached_attention import CachedForward

    from .writing import Writer


@attrs.frozen(kw_only=True)
class EvalGenerateConfig(PromptOptions):
    """Options, set by ``plugins.eval-generate.<field>=<value>``."""

    interval: int = attrs.field(default=100, validator=attrs.validators.ge(1))
    """Texts are written after every so many steps, and after the last. Unit: steps."""
    max_new_tokens: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Longest text after a prompt; the model's longest text ends it too. Unit: tokens."""
    temperature: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0.0), attrs.validators.lt(float("inf"))]
    )
    """Divides the logits before a token is drawn; 0 takes the most probable token."""
    top_k: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Draw of the most probable tokens only; 0: of all."""
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    """Draw of the most probable tokens whose probabilities just exceed this."""
    seed: int = attrs.field(
        default=0, validator=[attrs.validators.ge(0), attrs.validators.lt(2**63)]
    )
    """Of the draws, which are the same each time: only the model changes."""


class EvalGenerate:
    """Continue a few prompts with the model that is trained, and show the texts in the report.

    All ranks compute the same tokens, each with its part of the model, between two steps.

    Cost: the time of the texts; in all other steps one test of an attribute per layer. Numerics:
    bitwise neutral.
    """

    manifest = Manifest(
        name="eval-generate",
        summary="continue prompts with the model while it is trained, and report the texts",
        # A step of generation has the same tokens on every context-parallel rank.
        outside=(Claim.CONTEXT_PARALLEL,),
        attention=AttentionFeatures.all_but(),
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # only the user knows prompts
        maturity=Maturity.EXPERIMENTAL,
        small_model_settings={
            "prompt_ids": [[3, 1, 4], [2]],
            "interval": 1,
            "max_new_tokens": 3,
        },
    )
    config_class = EvalGenerateConfig

    def __init__(self, config: EvalGenerateConfig) -> None:
        self.config = config
        self._forward: CachedForward | None = None
        self._writer: Writer | None = None
        self._file = SampleFile()

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problems = [*read_prompts(self.config, config).problems]
        if config.model.num_labels:
            problems.append(
                f"model.num_labels={config.model.num_labels} gives the model a score head, which "
                "writes no text; leave eval-generate out"
            )
        return [f"eval-generate: {problem}" for problem in problems]

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return (ReportPanel(title="Texts of the model", metrics=(), table=FILE_NAME),)

    @hookimpl
    def ascend_attention(self, layer_index: int) -> Wrapper[AttentionKernel]:
        from ascend_run.ops.attention.block_attention import BlockAttention
        from ascend_run.ops.generation.cached_attention import CachedAttention, CachedForward

        forward = self._forward = self._forward or CachedForward()
        return lambda inner: CachedAttention(inner, layer_index, forward, BlockAttention())

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        if context.layout.rank == 0:
            self._file.forget_after(context.step, Path(context.config.run.output_dir))

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        is_last = context.step == context.config.train.train_iters
        if not is_last and context.step % self.config.interval:
            return
        if self._writer is None:
            from .writing import Writer

            assert self._forward is not None, "the model was built without its attention"
            self._writer = Writer(self.config, context, self._forward)
        texts = self._writer.texts(context)
        if context.layout.rank == 0:
            self._file.add(context.step, texts)

    @hookimpl
    def ascend_after_log(self, context: RunContext) -> None:
        self._file.write(Path(context.config.run.output_dir))

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self._file.write(Path(context.config.run.output_dir))
