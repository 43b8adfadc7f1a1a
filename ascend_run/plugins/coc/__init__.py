"""Linears of tensor parallelism in slices: one travels while the next is computed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.linear.linear_messages import GATHERED, buffers, in_slices
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
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class CocOptions:
    """Options, set by ``plugins.coc.<field>=<value>``."""

    parallel_num: int = attrs.field(default=2, validator=attrs.validators.in_((1, 2, 4, 8)))
    """Slices of the rows of a product; 1 does not slice. Fewer rows than that are one each."""
    recompute_all_gather: bool = True
    """With sequence parallelism: gather the input of a column-parallel linear again in backward;
    else keep it gathered, which takes as much memory as there are tensor-parallel ranks."""


class Coc:
    """Communication over computation: a product is cut along its rows, and the collective of one
    slice is under way while the next is multiplied.

    Cost: the same bytes, in ``parallel_num`` messages. Numerics: as without, but for how a library
    sums a product of fewer rows. Source: MindSpeed's CoC.
    """

    manifest = Manifest(
        name="coc",
        summary="overlap the messages of tensor-parallel linears with slices of their products",
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
        legacy_flags=("--use-ascend-coc", "--coc-parallel-num"),
        source="MindSpeed, communication over computation",
    )
    config_class = CocOptions

    def __init__(self, config: CocOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.tp == 1:
            return None
        split = config.parallel.sequence_parallel
        rows = rank.tokens // layout.tp if split else rank.tokens
        messages = in_slices(self.config.parallel_num, rows)
        keeps = split and not self.config.recompute_all_gather
        return CostChange(
            kept=(KeptChange(tensors=GATHERED, factor=layout.tp),) if keeps else (),
            messages=tuple(Messages(**m) for m in messages.changes(keep_gathered=keeps)),
            buffers=buffers(config),
        )

    @hookimpl
    def ascend_linear(self, config: RunConfig) -> c.Wrapper[nn.Module] | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None
        from ascend_run.ops.linear import sliced_matmul
        from ascend_run.ops.linear.parallel_linear import Products, change_way

        number = self.config.parallel_num
        products = Products(
            all_gather_matmul=functools.partial(sliced_matmul.all_gather_matmul, number=number),
            matmul_reduce_scatter=functools.partial(
                sliced_matmul.matmul_reduce_scatter, number=number
            ),
            matmul_all_reduce=functools.partial(sliced_matmul.matmul_all_reduce, number=number),
        )
        keep = not self.config.recompute_all_gather
        return lambda linear: change_way(linear, products=products, keep_gathered=keep)
