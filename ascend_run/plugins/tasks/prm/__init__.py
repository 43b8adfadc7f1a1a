"""Process reward model: rate each step of a solution, at the placeholder that ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    AscendRunError,
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
from ascend_run.plugins.tasks.shared.lengths import length_problems
from ascend_run.plugins.tasks.shared.samples import data_problems, label_problems
from ascend_run.text.sample_options import SampleOptions

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


def _several(instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if len({*value}) < max(2, len(value)):
        raise ValueError(f"{attribute.name} must be at least two different ratings")


@attrs.frozen(kw_only=True)
class PrmConfig(SampleOptions):
    """Options, set by ``plugins.prm.<field>=<value>``."""

    handler: str = "process-reward"
    """Data handler that reads the files: ``process-reward``, or any installed one that makes rated
    solutions."""
    placeholder_token: str = "ки"
    """The token that ends each step of a solution."""
    reward_tokens: tuple[str, ...] = attrs.field(default=("+", "-"), validator=_several)
    """The tokens of ratings; the first one is that of a right step."""
    too_long: str = attrs.field(
        default="drop", validator=attrs.validators.in_(("drop", "truncate"))
    )
    """Whether to drop a solution of more tokens than ``data.seq_length`` or
    ``model.max_position_embeddings``, or its last steps."""
    packing: bool = True
    """Pack as many solutions as fit into each sample, without attention between them."""


class Prm:
    """Train on the mean cross-entropy of the ratings at the placeholders of solutions, over the
    tokens of ratings alone.

    Source: Lightman et al. 2023, arXiv:2305.20050, section 2.6; the tokens: Wang et al. 2024,
    arXiv:2312.08935, section 3.4.
    """

    manifest = Manifest(
        name="prm",
        summary="process reward model: rate each step of a solution",
        claims=(Claim.DATASET, Claim.DOCUMENTS),
        attention_needs=AttentionFeatures(documents=True),
        small_model_settings={"placeholder_token": "*"},  # small tokenizers have single bytes
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--stage", key="task", values={"prm": "prm"}),
            LegacyFlag(
                flag="--placeholder-token", key="plugins.prm.placeholder_token", values=None
            ),
            LegacyFlag(flag="--reward-tokens", key="plugins.prm.reward_tokens", values=None),
        ),
        source="arXiv:2305.20050",
    )
    config_class = PrmConfig

    def __init__(self, config: PrmConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        from ascend_run.text.samples import ProcessReward

        sources = self.config.sources("prm", ProcessReward)
        problems = [
            *label_problems("prm", config),
            *length_problems("prm", config, packs=self.config.packing),
            *data_problems("prm", config, "rated solutions"),
            *sources.problems(config),
        ]
        return problems or [*_token_problems(config, self.config)]

    @hookimpl
    def ascend_task(self) -> c.Task:
        from .task import PrmTask

        return PrmTask(self.config)

    @hookimpl
    def ascend_batch(self) -> c.Wrapper[c.BatchIterator]:
        from ascend_run.plugins.tasks.shared.documents import separate_documents

        return separate_documents

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return [
            ReportPanel(
                title="Steps whose rating is the most probable one",
                metrics=("accuracy", "eval_accuracy"),
                unit="share",
            )
        ]


def _token_problems(config: RunConfig, options: PrmConfig) -> Iterator[str]:
    """Yield the placeholders and ratings that are not one token of the tokenizer."""
    from ascend_run.text.fields import RewardTokens
    from ascend_run.text.samples import ProcessReward

    tokenizer = options.sources("prm", ProcessReward).open_encoder(config).tokenizer
    try:
        RewardTokens.of(tokenizer, options.placeholder_token, options.reward_tokens)
    except AscendRunError as error:
        for problem in error.problems:
            yield (
                f"prm: {problem}; set plugins.prm.placeholder_token and plugins.prm.reward_tokens "
                "to tokens of the tokenizer"
            )
