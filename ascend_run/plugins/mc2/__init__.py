"""Linears of tensor parallelism with their messages inside the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.linear.linear_messages import (
    GATHERED,
    buffers,
    inside_the_product,
    round_a_ring,
)
from ascend_run.plugin_api import (
    Claim,
    Condition,
    CostChange,
    KeptChange,
    Layout,
    Manifest,
    Maturity,
    Messages,
    Numerics,
    PlatformOps,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class Mc2Options:
    """Options, set by ``plugins.mc2.<field>=<value>``."""

    keep_gathered: bool = False
    """With sequence parallelism: keep the gathered input of a column-parallel linear for backward,
    which spares a message and takes as much memory as there are tensor-parallel ranks."""


class Mc2:
    """Gather and multiply, multiply and reduce: one operator of the platform, or blocks of rows
    that go round a ring while others are multiplied.

    Cost: the same bytes; P - 1 messages in the place of one where they go round a ring. Numerics:
    sums over ranks in the order of the ring. Source: doi:10.1145/3567955.3567959.
    """

    manifest = Manifest(
        name="mc2",
        summary="fuse the messages of tensor-parallel linears with their matrix products",
        claims=(Claim.LINEAR_COMM,),
        idle=Condition.one_rank("tensor_model_parallel_size", why="linears send no messages"),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=("--use-ascend-mc2", "--use-mc2"),
        source="Wang et al. 2023, doi:10.1145/3567955.3567959",
    )
    config_class = Mc2Options

    def __init__(self, config: Mc2Options) -> None:
        self.config = config

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.tp == 1:
            return None
        # The NPU's operators communicate themselves; elsewhere the torch form is the ring.
        on_npu = config.platform == "npu"
        messages = inside_the_product() if on_npu else round_a_ring(layout.tp, rank.tokens)
        keeps = self.config.keep_gathered and config.parallel.sequence_parallel
        return CostChange(
            kept=(KeptChange(tensors=GATHERED, factor=layout.tp),) if keeps else (),
            messages=tuple(Messages(**m) for m in messages.changes(keep_gathered=keeps)),
            buffers=buffers(config),
        )

    @hookimpl
    def ascend_linear(self, config: RunConfig, ops: PlatformOps) -> c.Wrapper[nn.Module] | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None
        from ascend_run.ops.linear import collective_matmul
        from ascend_run.ops.linear.parallel_linear import Products, change_way

        products = Products(
            all_gather_matmul=ops.form(collective_matmul.all_gather_matmul),
            matmul_reduce_scatter=ops.form(collective_matmul.matmul_reduce_scatter),
            matmul_all_reduce=ops.form(collective_matmul.matmul_all_reduce),
        )
        keep = self.config.keep_gathered
        return lambda linear: change_way(linear, products=products, keep_gathered=keep)
