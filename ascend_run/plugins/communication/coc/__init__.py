"""CoC (communication over computation): tensor-parallel linears overlapped in slices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.ops.linear.linear_communication import GATHERED, buffers, in_slices
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
class CocOptions:
    """Options, set by ``plugins.coc.<field>=<value>``."""

    parallel_num: int = attrs.field(default=2, validator=attrs.validators.in_((1, 2, 4, 8)))
    """Number of slices of a matmul's rows; 1 does not slice. With fewer rows, every row is a
    slice."""
    recompute_all_gather: bool = True
    """With sequence parallelism: all-gather the input of a column-parallel linear again in
    backward. Otherwise the gathered input is saved, which takes as many times the memory as there
    are tensor-parallel ranks."""


class Coc:
    """Split a matmul by rows, and overlap the collective of one slice with the matmul of the next.

    Cost: the same bytes, in ``parallel_num`` collectives. Numerics: unchanged, except that a
    library may use a different reduction order for a matmul with fewer rows. Source: MindSpeed's
    CoC.
    """

    manifest = Manifest(
        name="coc",
        summary="overlap the collectives of tensor-parallel linears with slices of their matmuls",
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
            LegacyFlag(flag="--use-ascend-coc"),
            LegacyFlag(flag="--coc-parallel-num", key="plugins.coc.parallel_num", values=None),
        ),
        source="MindSpeed, communication over computation",
    )
    config_class = CocOptions

    def __init__(self, config: CocOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.tp == 1:
            return None
        split = config.parallel.sequence_parallel
        rows = rank.tokens // layout.tp if split else rank.tokens
        messages = in_slices(self.config.parallel_num, rows)
        keeps = split and not self.config.recompute_all_gather
        return CostChange(
            saved=(SavedChange(tensors=GATHERED, factor=layout.tp),) if keeps else (),
            communication=tuple(Communication(**m) for m in messages.changes(keep_gathered=keeps)),
            buffers=buffers(config),
        )

    @hookimpl
    def ascend_linear(self, config: RunConfig, ops: PlatformOps) -> c.ModuleWrapper | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None
        from ascend_run.ops.linear import sliced_matmul
        from ascend_run.ops.linear.parallel_linear import linear_link
        from ascend_run.ops.linear.plain_matmuls import CollectiveMatmuls

        how: dict[str, Any] = {"number": self.config.parallel_num}
        if ops.matmul is not None:
            how["matmul"] = ops.matmul
        products = CollectiveMatmuls(
            all_gather_matmul=functools.partial(sliced_matmul.all_gather_matmul, **how),
            matmul_reduce_scatter=functools.partial(sliced_matmul.matmul_reduce_scatter, **how),
            matmul_all_reduce=functools.partial(sliced_matmul.matmul_all_reduce, **how),
        )
        keep = not self.config.recompute_all_gather
        return lambda linear: linear_link(linear, fused=products, keep_gathered=keep)
