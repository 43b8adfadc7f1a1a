"""The same bits from the same run: deterministic operators, collectives and hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    CostChange,
    KeptTensor,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    RankKind,
    Support,
    Wrapper,
    hookimpl,
)

from .variables import variables_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ascend_run.plugin_api import RunConfig


@attrs.frozen(kw_only=True)
class DeterministicConfig:
    """Options, set by ``plugins.deterministic.<field>=<value>``."""

    fill_uninitialized_memory: bool = False
    """Fill what ``torch.empty`` gives with NaN, so that code which reads it before writing shows.
    Costs one more write of every new tensor."""


class Deterministic:
    """Make two runs of one command, on the same machines, give the same bits.

    Cost: slower kernels where the fast ones add in an order of chance; outputs of experts are kept
    for backward; no messages. Numerics: the order of sums, where a deterministic kernel takes the
    place of another.
    """

    manifest = Manifest(
        name="deterministic",
        summary="give the same bits in every run of one command",
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=("--npu-deterministic", "--use-deter-comp"),
        source="PyTorch notes, Reproducibility",
    )
    config_class = DeterministicConfig

    def __init__(self, config: DeterministicConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_environment(self, config: RunConfig) -> Mapping[str, str]:
        return variables_of(config.platform, config.run.seed, os.environ)

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        """Megatron adds the outputs of experts up by ``index_add``, whose backward keeps them, in
        the place of ``scatter_add``."""
        if not rank.moe_layers:
            return None
        layers = tuple(sorted(rank.moe_layers))
        rows = sum(t.nbytes for t in rank.kept[layers[0]] if t.key == "experts.input")
        combined = KeptTensor(part="dispatcher", name="combined", nbytes=rows / layout.expt_tp)
        return CostChange(kept_added=(combined,), kept_added_layers=layers)

    @hookimpl
    def ascend_process_settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        from .settings import deterministic_torch

        fills = self.config.fill_uninitialized_memory
        return {"torch.deterministic": deterministic_torch(fill_uninitialized_memory=fills)}

    @hookimpl
    def ascend_configure(self) -> Wrapper[Mapping[str, Any]]:
        return lambda arguments: {**arguments, "deterministic_mode": True}
