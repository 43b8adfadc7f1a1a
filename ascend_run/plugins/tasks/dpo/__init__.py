"""Direct preference optimization: prefer the chosen answer of each pair over the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Claim,
    ConfigError,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)
from ascend_run.plugins.tasks.shared.lengths import longest_document
from ascend_run.plugins.tasks.shared.pairs import (
    PairTaskPlugin,
    pair_panels,
    pair_problems,
    smoothing_problems,
)
from ascend_run.text.sample_options import PreferenceOptions

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c

BASE = "base"
LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")


@attrs.frozen(kw_only=True)
class DpoConfig(PreferenceOptions):
    """Options, set by ``plugins.dpo.<field>=<value>``."""

    beta: float = attrs.field(default=0.1, validator=attrs.validators.gt(0.0))
    """Weight of the log-ratios of policy and reference: the larger, the closer the policy stays to
    the reference."""
    loss: str = attrs.field(default="sigmoid", validator=attrs.validators.in_(LOSS_TYPES))
    """``sigmoid``; ``robust``, against pairs with swapped answers; ``hinge``; ``ipo``."""
    reference: str | None = None
    """Hugging Face folder of the reference's weights; ``base``: the policy without its adapters,
    which needs no second model; default: ``base`` if it has adapters, else those of
    ``model.hf_path``, else the initial ones."""
    reference_free: bool = False
    """Compare with a reference to which all answers are equally probable; none is loaded."""
    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probabilities of all pairs before the first step, and keep them
    in the cache of the data; the steps have no reference then."""


class Dpo(PairTaskPlugin):
    """Train on the mean over pairs of a loss of log-ratios between policy and frozen reference.

    A pair is two documents of a packed row, the prompt with each answer; tokens do not attend to
    other documents. A log-probability is the sum over the answer's tokens.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7.
    """

    manifest = Manifest(
        name="dpo",
        summary="direct preference optimization: train on pairs of a chosen and a rejected answer",
        # Its samples come from its own files, so no other plugin may provide the dataset.
        claims=(Claim.DATASET, Claim.DOCUMENTS),
        attention_needs=AttentionFeatures(documents=True),
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--stage", key="task", values={"dpo": "dpo"}),
            LegacyFlag(flag="--dpo-beta", key="plugins.dpo.beta", values=None),
            LegacyFlag(
                flag="--dpo-loss-type",
                key="plugins.dpo.loss",
                values={name: name for name in ("sigmoid", "hinge", "ipo")},
            ),
            LegacyFlag(
                flag="--dpo-label-smoothing", key="plugins.dpo.label_smoothing", values=None
            ),
            LegacyFlag(flag="--pref-ftx", key="plugins.dpo.sft_weight", values=None),
            LegacyFlag(flag="--ref-model", key="plugins.dpo.reference", values=None),
        ),
        source="arXiv:2305.18290",
    )
    config_class = DpoConfig

    def __init__(self, config: DpoConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(
        self,
        config: RunConfig,
        manifests: Sequence[Manifest],
        model_differences: Callable[[str], Sequence[str]],
    ) -> Sequence[str]:
        return [
            *_option_problems(config, self.config),
            *_reference_problems(self.config, manifests, model_differences),
            *_base_problems(config, self.config, manifests),
            *([] if self.config.reference_free else _mode_problems(config, self.config)),
            *pair_problems("dpo", config, self.config),
        ]

    @hookimpl
    def ascend_defaults(self, manifests: Sequence[Manifest]) -> Mapping[str, object]:
        """Return the base as the reference if it is there anyway."""
        has_base = _have_adapters(manifests) and not self.config.reference_free
        return {"plugins.dpo.reference": BASE} if has_base else {}

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        from .task import log_reference

        log_reference(context, self.config)

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the cost of the reference."""
        if self.config.reference_free:
            return None
        from .cost import precomputed_cost, reference_cost

        if self.config.precompute_ref_log_probs:
            return precomputed_cost(is_model=self.config.reference != BASE)
        return reference_cost(rank, is_model=self.config.reference != BASE)

    @hookimpl
    def ascend_task(self) -> c.Task:
        from .task import DpoTask

        return DpoTask(self.config)

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return pair_panels("Log-probabilities of answers")


def _option_problems(config: RunConfig, options: DpoConfig) -> Iterator[str]:
    """Yield the problems of the options, before any file is opened."""
    yield from smoothing_problems("dpo", options, options.loss, ("sigmoid", "robust"))
    if options.label_smoothing == 0.5 and options.loss == "robust":
        yield (
            "dpo: plugins.dpo.label_smoothing=0.5 divides by 0 with plugins.dpo.loss=robust; use "
            "less than 0.5"
        )
    if options.reference_free and options.reference is not None:
        yield (
            f"dpo: plugins.dpo.reference={options.reference} is not used with "
            "plugins.dpo.reference_free=true; leave out one of the two"
        )
    if options.reference_free and options.precompute_ref_log_probs:
        yield (
            "dpo: plugins.dpo.precompute_ref_log_probs=true has nothing to compute with "
            "plugins.dpo.reference_free=true; leave out one of the two"
        )
    if config.checkpoint.load and options.reference is None and not options.reference_free:
        yield (
            f"dpo: the policy begins with checkpoint.load={config.checkpoint.load}, which the "
            "reference cannot; name its weights as a Hugging Face folder in plugins.dpo.reference"
        )


def _mode_problems(config: RunConfig, options: DpoConfig) -> Iterator[str]:
    """Yield what would compute otherwise in a reference, which does not train."""
    model, rows = config.model, config.train.micro_batch_size
    if options.precompute_ref_log_probs and model.moe_expert_capacity_factor and rows > 1:
        yield (
            f"dpo: model.moe_expert_capacity_factor={model.moe_expert_capacity_factor} drops "
            "tokens by what else is in a micro-batch, and with "
            "plugins.dpo.precompute_ref_log_probs=true the reference computes each sample alone; "
            f"expected train.micro_batch_size=1, got {rows}"
        )
    if model.num_moe_experts and model.moe_router_load_balancing_type == "sinkhorn":
        yield (
            "dpo: model.moe_router_load_balancing_type=sinkhorn routes in training alone, and so "
            "not in the reference; use none"
        )
    length = model.log_n_scaling_length
    if length and not model.log_n_scaling_in_training and longest_document(config) > length:
        yield (
            f"dpo: model.log_n_scaling_length={length} scales the reference alone, which does not "
            f"train; use data.seq_length={length} or less"
        )


def _have_adapters(manifests: Sequence[Manifest]) -> bool:
    return any(Claim.ADAPTER in one.claims for one in manifests)


def _base_problems(
    config: RunConfig, options: DpoConfig, manifests: Sequence[Manifest]
) -> Iterator[str]:
    """Yield what of a base does not stay as it is: the option of adapters has PEFT's name."""
    if options.reference != BASE:
        return
    for name in (one.name for one in manifests if Claim.ADAPTER in one.claims):
        if modules := getattr(config.plugins[name], "modules_to_save", ()):
            yield (
                f"dpo: plugins.dpo.reference=base is no reference with plugins.{name}."
                f"modules_to_save={','.join(modules)}, which are trained in place; leave these "
                "out, or name a Hugging Face folder in plugins.dpo.reference"
            )


def _reference_problems(
    options: DpoConfig,
    manifests: Sequence[Manifest],
    model_differences: Callable[[str], Sequence[str]],
) -> Iterator[str]:
    """Yield what is wrong with the reference."""
    if options.reference == BASE and not _have_adapters(manifests):
        yield (
            "dpo: plugins.dpo.reference=base is the policy without its adapters, and the run has "
            "none; enable lora, or leave the option out"
        )
    if options.reference in (None, BASE) or options.reference_free:
        return
    named = f"dpo: plugins.dpo.reference={options.reference}"
    try:
        differences = model_differences(options.reference)
    except ConfigError as error:
        yield f"{named}: {error.headline}{''.join(f'; {one}' for one in error.problems)}"
        return
    if differences:
        yield (
            f"{named} holds another model, and the reference is built as this run's: "
            f"{'; '.join(differences)}; name a folder of a model like this one"
        )
