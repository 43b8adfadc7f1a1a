"""Deterministic runs: deterministic operators, collectives and hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    SavedTensor,
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
    """Fill the result of ``torch.empty`` with NaN, which exposes code that reads it before writing.
    Costs one more write of every new tensor."""


class Deterministic:
    """Make two runs of one command, on the same machines, bitwise equal.

    Cost: slower kernels where the fast ones have a nondeterministic reduction order; outputs of
    experts are saved for backward; no communication. Numerics: a different reduction order where a
    deterministic kernel replaces another.
    """

    manifest = Manifest(
        name="deterministic",
        summary="make repeated runs of one command bitwise identical",
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--npu-deterministic"),
            LegacyFlag(flag="--use-deter-comp"),
        ),
        source="PyTorch notes, Reproducibility",
    )
    config_class = DeterministicConfig

    def __init__(self, config: DeterministicConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_environment(self, config: RunConfig) -> Mapping[str, str]:
        return variables_of(config.platform, config.run.seed, os.environ)

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: PipelineStage) -> CostChange | None:
        """Return the expert outputs that are saved for backward.

        Megatron combines them with ``index_add``, whose backward saves them, instead of
        ``scatter_add``.
        """
        if not rank.moe_layers:
            return None
        layers = tuple(sorted(rank.moe_layers))
        rows = sum(t.nbytes for t in rank.saved[layers[0]] if t.key == "experts.input")
        combined = SavedTensor(part="dispatcher", name="combined", nbytes=rows / layout.expt_tp)
        return CostChange(saved_added=(combined,), saved_added_layers=layers)

    @hookimpl
    def ascend_process_settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        from .settings import deterministic_torch

        fills = self.config.fill_uninitialized_memory
        return {"torch.deterministic": deterministic_torch(fill_uninitialized_memory=fills)}

    @hookimpl
    def ascend_configure(self) -> Wrapper[Mapping[str, Any]]:
        return lambda arguments: {**arguments, "deterministic_mode": True}
