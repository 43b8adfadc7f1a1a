"""Leave out collectives that the recomputation of a layer need not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    Claim,
    Communication,
    Condition,
    CostChange,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Numerics,
    PipelineStage,
    RunConfig,
    SavedTensor,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c
    from ascend_run.types.forward import ForwardLink

NAME: Final = "recompute-comm-opt"
_FLAG: Final = "--optimize-recomp-communication-level"


@attrs.frozen(kw_only=True)
class RecomputeCommOptConfig:
    """Options, set by ``plugins.recompute-comm-opt.<field>=<value>``."""

    level: int = attrs.field(default=1, validator=attrs.validators.in_((1, 2)))
    """``1``: the sum over tensor-parallel ranks at the end of a layer is not repeated; ``2``: nor
    is the one after its attention, since attention and MLP are recomputed one by one, each from its
    own input: one more hidden state of a layer is saved."""


class RecomputeCommOpt:
    """Leave out the sums over tensor-parallel ranks at the end of what is recomputed.

    No gradient depends on the values of such a sum, and nothing else reads it again. Cost: of six
    sums of a recomputed layer one is left out (``level=1``), or two; with ``level=2`` one hidden
    state more is saved for it. Numerics: bitwise neutral. Source: the behaviour of AscendSpeed's
    ``--optimize-recomp-communication-level``.
    """

    manifest = Manifest(
        name=NAME,
        summary="leave out collectives that the recomputation of layers need not repeat",
        claims=(Claim.LINEAR_COMM,),
        idle=Condition.one_rank("tensor_model_parallel_size", why="linears need no collectives"),
        conflicts={
            "adaptive-recompute": "what is recomputed is known after the first steps only, and the "
            "sums are left out from the first one; use recompute"
        },
        after=("matmul-add",),  # which replaces the same forwards
        forward_links={"linear": LinkPlace.OWN, "layer": LinkPlace.OWN},
        exercised_by="enable recompute beside it: it acts on layers that are recomputed",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.EMULATED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it acts beside recompute only
        legacy_flags=(
            LegacyFlag(flag=_FLAG, values={"1": True, "2": True}),
            LegacyFlag(flag=_FLAG, key=f"plugins.{NAME}.level", values={"1": 1, "2": 2}),
        ),
        source="AscendSpeed, docs/features/recomputation-communication.md",
    )
    config_class = RecomputeCommOptConfig

    def __init__(self, config: RecomputeCommOptConfig) -> None:
        self.config = config
        self._acts = False

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(_problems(config))

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the sums that recomputed parts do not repeat, and the inputs of MLPs."""
        if layout.tp == 1:
            return None
        operation = "reduce_scatter" if config.parallel.sequence_parallel else "all_reduce"
        parts = ("feed-forward", "attention")[: self.config.level]
        left_out = tuple(
            Communication(
                operation=operation,
                group="tp",
                calls=0,
                sent_bytes=0,
                why=f"{part}, forward, again",
                replaces=operation,
            )
            for part in parts
        )
        return CostChange(communication=left_out, saved_added=tuple(self._inputs(rank)))

    def _inputs(self, rank: PipelineStage) -> Iterator[SavedTensor]:
        """Yield the input of a layer's MLP, which is that of the norm before it."""
        sizes = {t.key: t.nbytes for n in rank.layers[:1] for t in rank.saved[n]}
        if self.config.level == 2 and "mlp_norm.input" in sizes:
            yield SavedTensor(
                part="recomputation", name="mlp_input", nbytes=sizes["mlp_norm.input"]
            )

    @hookimpl
    def ascend_layer(self, config: RunConfig) -> c.ModuleWrapper | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None

        def wrap(layer: Any) -> Mapping[str, ForwardLink]:
            from .links import layer_links

            links = layer_links(layer, by_blocks=self.config.level == 2)
            self._acts |= bool(links)
            return links

        return wrap

    @hookimpl
    def ascend_before_run(self, context: c.RunContext) -> None:
        if self._acts or context.config.parallel.tensor_model_parallel_size == 1:
            return
        import structlog

        why = "this rank recomputes no layer, nor the MLP of one without experts"
        structlog.get_logger().warning("plugin.idle", plugin=NAME, changes_nothing_as=why)


def _problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    if config.parallel.tensor_model_parallel_size == 1:
        return
    selects = model.recompute_granularity == "selective"
    if model.recompute_granularity == "full" or (
        selects and "mlp" in (model.recompute_modules or ())
    ):
        yield (
            f"{NAME}: what Megatron recomputes itself (model.recompute_granularity="
            f"{model.recompute_granularity}; plugins.recompute.method=uniform) repeats every "
            "collective; use recompute with plugins.recompute.method=block instead, or leave "
            f"{NAME} out"
        )
    if model.norm_placement != "pre":
        yield (
            f"{NAME}: with model.norm_placement={model.norm_placement} a norm of the sum over "
            f"ranks reads it in backward; leave {NAME} out"
        )
