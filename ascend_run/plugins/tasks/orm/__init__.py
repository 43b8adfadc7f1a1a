"""Outcome reward model: score answers, so that the chosen one of each pair has the larger score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ascend_run.plugins.tasks.shared.pairs import PairTaskPlugin, pair_problems, reward_panels
from ascend_run.text.sample_options import PairOptions

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


NUM_LABELS = 1
"""A reward is one score."""


@attrs.frozen(kw_only=True)
class OrmConfig(PairOptions):
    """Options, set by ``plugins.orm.<field>=<value>``."""

    margin: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))
    """By how much the chosen answer's reward should be larger."""
    center_rewards_coefficient: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))
    """Weight of the square of the sum of both rewards, which keeps their mean near 0."""


class Orm(PairTaskPlugin):
    """Train a score head and its model on the mean over pairs of ``-log sigmoid`` of the difference
    of rewards, after Bradley and Terry.

    A pair is two documents of a packed row, as in ``dpo``; the reward of an answer is the score at
    the last token of its document.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; the coefficient: Eisenstein et al.
    2023, arXiv:2312.09244.
    """

    manifest = Manifest(
        name="orm",
        summary="outcome reward model: score answers, trained on pairs of them",
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
        legacy_flags=(LegacyFlag(flag="--stage", key="task", values={"orm": "orm", "rm": "orm"}),),
        source="arXiv:2203.02155",
    )
    config_class = OrmConfig

    def __init__(self, config: OrmConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_defaults(self) -> Mapping[str, object]:
        """Return the score head of the model."""
        return {"model.num_labels": NUM_LABELS}

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return pair_problems("orm", config, self.config, num_labels=NUM_LABELS)

    @hookimpl
    def ascend_task(self) -> c.Task:
        from .task import OrmTask

        return OrmTask(self.config)

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return reward_panels()
