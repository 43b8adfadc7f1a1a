"""MC2: collectives of tensor-parallel linears fused with their matmuls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.linear.linear_communication import (
    GATHERED,
    buffers,
    inside_the_product,
    round_a_ring,
)
from ascend_run.plugin_api import (
    Claim,
    Communication,
    Condition,
    CostChange,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    SavedChange,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class Mc2Options:
    """Options, set by ``plugins.mc2.<field>=<value>``."""

    keep_gathered: bool = False
    """With sequence parallelism: save the gathered input of a column-parallel linear for backward.
    This avoids one collective, and takes as many times the memory as there are tensor-parallel
    ranks."""


class Mc2:
    """Fuse all-gather with matmul, and matmul with reduction.

    The platform's fused operator is used if it has one; otherwise blocks of rows are passed round a
    ring, overlapped with the matmuls of others. Cost: the same bytes; P - 1 sends instead of one
    collective for the ring. Numerics: the ring's reduction order over ranks. Source:
    doi:10.1145/3567955.3567959.
    """

    manifest = Manifest(
        name="mc2",
        summary="fuse the collectives of tensor-parallel linears with their matmuls",
        claims=(Claim.LINEAR_COMM,),
        idle=Condition.one_rank("tensor_model_parallel_size", why="linears need no collectives"),
        forward_links={"linear": LinkPlace.OWN},
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.EMULATED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--use-ascend-mc2"),
            LegacyFlag(flag="--use-mc2"),
        ),
        source="Wang et al. 2023, doi:10.1145/3567955.3567959",
    )
    config_class = Mc2Options

    def __init__(self, config: Mc2Options) -> None:
        self.config = config

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.tp == 1:
            return None
        # The NPU's operators communicate themselves; elsewhere the torch implementation is a ring.
        on_npu = config.platform == "npu"
        messages = inside_the_product() if on_npu else round_a_ring(layout.tp, rank.tokens)
        keeps = self.config.keep_gathered and config.parallel.sequence_parallel
        return CostChange(
            saved=(SavedChange(tensors=GATHERED, factor=layout.tp),) if keeps else (),
            communication=tuple(Communication(**m) for m in messages.changes(keep_gathered=keeps)),
            buffers=buffers(config),
        )

    @hookimpl
    def ascend_linear(self, config: RunConfig, ops: PlatformOps) -> c.ModuleWrapper | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None
        from ascend_run.ops.linear import collective_matmul
        from ascend_run.ops.linear.parallel_linear import linear_link
        from ascend_run.ops.linear.plain_matmuls import CollectiveMatmuls

        products = CollectiveMatmuls(
            all_gather_matmul=ops.form(collective_matmul.all_gather_matmul),
            matmul_reduce_scatter=ops.form(collective_matmul.matmul_reduce_scatter),
            matmul_all_reduce=ops.form(collective_matmul.matmul_all_reduce),
        )
        keep = self.config.keep_gathered
        return lambda linear: linear_link(linear, fused=products, keep_gathered=keep)
