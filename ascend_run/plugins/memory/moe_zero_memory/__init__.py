"""Recompute in backward what the experts of a layer would save for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.experts.dispatcher_cost import NO_EXPERTS
from ascend_run.ops.experts.recompute_cost import recompute_cost
from ascend_run.plugin_api import (
    CostChange,
    ForwardLink,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    ModuleWrapper,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import random_state

from .kept import keeps_tokens

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch import nn

    from ascend_run.ops.experts.moe_recompute import Saves

_LINKED: Final = ("moe_layer", "router", "experts", "shared_experts")


@attrs.frozen(kw_only=True)
class MoeZeroMemoryConfig:
    """Options, set by ``plugins.moe-zero-memory.<field>=<value>``."""

    level: int = attrs.field(default=0, validator=attrs.validators.in_((0, 1)))
    """0 keeps the tokens sent to the experts in as many layers as 30 % of the memory allows; 1
    keeps them in none."""
    num_layers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Number of layers with experts per rank, from the first; default, and on a rank that has
    fewer: all. Unit: layers."""


class MoeZeroMemory:
    """Drop what the experts of a layer save in forward, and compute it again in backward.

    Cost: the first matmul of the experts and their activation; where the tokens are dropped, their
    dispatch. Numerics: bitwise neutral. Source: the behaviour of MindSpeed's
    ``--moe-zero-memory``.
    """

    manifest = Manifest(
        name="moe-zero-memory",
        summary="recompute what experts save, and dispatch their tokens again",
        after=("hot-experts",),  # so that the replicas are recomputed too
        idle=NO_EXPERTS,
        forward_links=dict.fromkeys(_LINKED, LinkPlace.AROUND),
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=2,
        legacy_flags=(
            LegacyFlag(
                flag="--moe-zero-memory",
                key="plugins.moe-zero-memory.level",
                values={"level0": 0, "level1": 1},
            ),
            LegacyFlag(
                flag="--moe-zero-memory-num-layers",
                key="plugins.moe-zero-memory.num_layers",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/megatron_moe/megatron-moe-zero-memory.md",
    )
    config_class = MoeZeroMemoryConfig

    def __init__(self, config: MoeZeroMemoryConfig) -> None:
        self.config = config
        self._built: dict[str, int] = {}

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(self._problems(config))

    def _problems(self, config: RunConfig) -> Iterator[str]:
        model = config.model
        if not model.num_moe_experts:
            return
        if model.recompute_granularity == "full":
            yield (
                "moe-zero-memory: model.recompute_granularity=full recomputes the experts already; "
                "use selective recomputation, or leave moe-zero-memory out"
            )
        twice = {"moe", "moe_act", "shared_experts"} & {*(model.recompute_modules or ())}
        if model.recompute_granularity == "selective" and twice:
            yield (
                "moe-zero-memory: model.recompute_modules names "
                f"{' and '.join(sorted(twice))}, which it recomputes itself; leave out one"
            )
        if model.moe_shared_expert_overlap:
            yield (
                "moe-zero-memory: model.moe_shared_expert_overlap=true computes the shared experts "
                "within the dispatcher, where they cannot be recomputed; set it to false"
            )

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        layers = sorted(rank.moe_layers)[: self.config.num_layers]
        if not layers:
            return None
        ranks = layout.expt_tp
        keeping = [n for at, n in enumerate(layers) if self._keeps_tokens(config, ranks, at)]
        return recompute_cost(config, layout, rank, layers=layers, keeping=keeping, shared=True)

    def _keeps_tokens(self, config: RunConfig, expert_ranks: int, at: int) -> bool:
        """Return whether the tokens are kept in one of a rank's layers, counted from 0."""
        return self.config.level == 0 and keeps_tokens(config, expert_ranks, at)

    @hookimpl
    def ascend_moe_layer(
        self, config: RunConfig, groups: ProcessGroupCollection, role: str
    ) -> ModuleWrapper | None:
        at = self._built[role] = self._built.get(role, -1) + 1
        if self.config.num_layers is not None and at >= self.config.num_layers:
            return None
        from ascend_run.ops.experts.moe_recompute import MoeRecompute, Saves

        keeps = self._keeps_tokens(config, groups.expt_tp.size(), at)
        saves = Saves.TOKENS if keeps else Saves.NOTHING

        def choose(*_: object) -> Saves:
            return saves

        def wrap(module: nn.Module) -> dict[str, ForwardLink]:
            return MoeRecompute(module, choose, random_state, shared=True).links()

        return wrap
