"""Simple preference optimization: prefer the chosen answer by its mean log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Claim,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    ReportPanel,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.tasks.shared.pairs import (
    PairTaskPlugin,
    pair_panels,
    pair_problems,
    smoothing_problems,
)
from ascend_run.text.sample_options import PreferenceOptions

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c

LOSS_TYPES = ("sigmoid", "hinge", "ipo")


@attrs.frozen(kw_only=True)
class SimpoConfig(PreferenceOptions):
    """Options, set by ``plugins.simpo.<field>=<value>``."""

    beta: float = attrs.field(default=2.5, validator=attrs.validators.gt(0.0))
    """Weight of the difference of mean log-probabilities."""
    gamma_beta_ratio: float = attrs.field(default=1.4, validator=attrs.validators.ge(0.0))
    """Target margin between the mean log-probabilities: the paper's gamma by beta."""
    loss: str = attrs.field(default="sigmoid", validator=attrs.validators.in_(LOSS_TYPES))
    """``sigmoid``, ``hinge`` or ``ipo``, of the difference less the target margin."""


class Simpo(PairTaskPlugin):
    """Train on the mean over pairs of a loss of mean log-probabilities; there is no reference.

    A pair is two documents of a packed row, as in ``dpo``.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """

    manifest = Manifest(
        name="simpo",
        summary="simple preference optimization: pairs of answers, without a reference model",
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
            LegacyFlag(flag="--stage", key="task", values={"simpo": "simpo"}),
            LegacyFlag(flag="--simpo-beta", key="plugins.simpo.beta", values=None),
            LegacyFlag(
                flag="--gamma-beta-ratio", key="plugins.simpo.gamma_beta_ratio", values=None
            ),
            LegacyFlag(
                flag="--simpo-loss-type",
                key="plugins.simpo.loss",
                values={name: name for name in LOSS_TYPES},
            ),
            LegacyFlag(
                flag="--simpo-label-smoothing", key="plugins.simpo.label_smoothing", values=None
            ),
            LegacyFlag(flag="--pref-ftx", key="plugins.simpo.sft_weight", values=None),
        ),
        source="arXiv:2405.14734",
    )
    config_class = SimpoConfig

    def __init__(self, config: SimpoConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return [
            *smoothing_problems("simpo", self.config, self.config.loss, ("sigmoid",)),
            *pair_problems("simpo", config, self.config),
        ]

    @hookimpl
    def ascend_task(self) -> c.Task:
        from .task import SimpoTask

        return SimpoTask(self.config)

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return pair_panels("Mean log-probabilities of answers")
