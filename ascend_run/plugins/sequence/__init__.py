"""Context parallelism: how a sequence is sharded over ranks, and documents within it.

Every context-parallel plugin is a ``ContextParallelPlugin``: a manifest, options and the plan that
follows from them. The hooks are shared. Legacy flags of the reference systems that set options of
several plugins are defined here once.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import attrs

from ascend_run.ops.attention.context_parallel import cost
from ascend_run.ops.attention.context_parallel.options import kv_cache_problems
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Condition,
    CostChange,
    HookError,
    Layout,
    LegacyFlag,
    Manifest,
    Numerics,
    PipelineStage,
    RunConfig,
    SequencePartition,
    Support,
    Wrapper,
    divisors,
    hookimpl,
    one_of,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

Options = TypeVar("Options")


_ONE_RANK: Final = Condition.one_rank(
    "context_parallel_size", why="one rank holds the full sequence"
)
_LEGACY_FLAGS: Final[Mapping[str, Sequence[LegacyFlag]]] = {
    "partition": tuple(
        LegacyFlag(flag=flag, key="cut", values={"causal": "zig-zag", "general": "contiguous"})
        for flag in ("--attention-mask-type", "--cp-attention-mask-type")
    ),
    "kv_cache": (
        LegacyFlag(
            flag="--context-parallel-kv-cache-policy",
            key="kv_cache",
            values={"half": "half", "full": "full"},
        ),
        LegacyFlag(
            flag="--context-parallel-cache-interval", key="kv_cache_every", values=None, plus=1
        ),
    ),
    "ulysses_degree": (
        LegacyFlag(flag="--ulysses-degree-in-cp", key="ulysses_degree", values=None),
    ),
    "window": (LegacyFlag(flag="--cp-window-size", key="window", values=None),),
    "remap": (LegacyFlag(flag="--adaptive-cp-only-reschedule", key="remap", values={"": False}),),
}
"""Legacy flags of options that several plugins have; a key lacks the plugin's prefix."""


def exchange_manifest(
    name: str,
    summary: str,
    *,
    source: str,
    in_blocks: bool = True,
    legacy_flags: tuple[LegacyFlag, ...] = (),
) -> Manifest:
    """Return the manifest of a context-parallel plugin.

    Args:
        in_blocks: Whether the inner kernel computes blocks of the keys. Sinks are then applied
            after the merge, whether or not the inner kernel supports them.
    """
    return Manifest(
        name=name,
        summary=summary,
        idle=_ONE_RANK,
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.EMULATED,
            "npu": Support.ARITHMETIC,
        },
        attention=AttentionFeatures.all_but(),
        attention_needs=AttentionFeatures(unequal_lengths=in_blocks),
        level=2,
        legacy_flags=legacy_flags,
        source=source,
    )


def option_flags(plugin: str, *options: str) -> tuple[LegacyFlag, ...]:
    """Return the legacy flags that set ``plugins.<plugin>.<option>``.

    Args:
        options: Keys of ``_LEGACY_FLAGS``.
    """
    flags = (flag for option in options for flag in _LEGACY_FLAGS[option])
    return tuple(attrs.evolve(flag, key=f"plugins.{plugin}.{flag.key}") for flag in flags)


class ContextParallelPlugin(abc.ABC, Generic[Options]):
    """Implement the hooks of a context-parallel plugin from its plan."""

    def __init__(self, config: Options) -> None:
        self.config = config

    @abc.abstractmethod
    def plan(self, config: RunConfig) -> ContextParallelPlan:
        """Return what the ranks of a context-parallel group do in this run."""

    def problems(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Return the conflicts that core does not already check.

        Core checks tensor parallelism and the sequence length.
        """
        plan, cp, tp = self.plan(config), layout.cp, layout.tp
        option = f"plugins.{plan.plugin}"
        yield from kv_cache_problems(plan.plugin, plan.kv_cache, config.model.num_layers)
        if plan.keys == "heads":
            return
        degree, heads = plan.head_degree, config.model.num_attention_heads
        of_ring = f"parallel.context_parallel_size={cp}"
        if degree is not None:
            if cp % degree:
                yield (
                    f"{plan.plugin}: {option}.ulysses_degree={degree} does not divide "
                    f"parallel.context_parallel_size={cp}; use {one_of(divisors(cp))}"
                )
                return
            if heads % tp == 0 and heads // tp % degree:
                fitting = [number for number in divisors(cp) if heads // tp % number == 0]
                yield (
                    f"{plan.plugin}: {heads} heads (model.num_attention_heads) cannot be split "
                    f"over tp={tp} x {option}.ulysses_degree={degree}; use a degree of "
                    f"{one_of(fitting)}"
                )
            of_ring = f"the ring of {plan.ring_degree} ({of_ring} / ulysses_degree={degree})"
        if plan.window is not None and plan.ring_degree % plan.window:
            yield (
                f"{plan.plugin}: {option}.window={plan.window} does not divide {of_ring}; use a "
                f"window of {one_of(divisors(plan.ring_degree))}"
            )

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*self.problems(config, layout)] if layout.cp > 1 else []

    @hookimpl
    def ascend_process_groups(
        self, config: RunConfig, layout: Layout
    ) -> Mapping[str, Sequence[Sequence[int]]]:
        return self.plan(config).rank_lists(layout) if layout.cp > 1 else {}

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        shared = config.parallel.context_parallel_size > 1
        return self.plan(config).rank_partition if shared else None

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.cp <= 1:
            return None
        sequence = cost.Sequence(
            length=config.data.seq_length,
            rows=config.train.micro_batch_size,
            window=config.model.window_size,
        )
        return cost.context_parallel_cost(self.plan(config), rank, sequence, layout.tp)

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: ProcessGroupCollection, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        """Wrap the attention kernel in the exchange of the plan.

        Raises:
            HookError: The inner kernel cannot compute blocks of the keys.
        """
        if config.parallel.context_parallel_size <= 1:
            return None
        from ascend_run.ops.attention.context_parallel.inner import missing_features
        from ascend_run.ops.attention.context_parallel.kernel import context_parallel_kernel

        plan = self.plan(config)

        def wrap(inner: AttentionKernel) -> AttentionKernel:
            if plan.keys != "heads" and (problems := missing_features(inner)):
                name = type(inner).__name__
                raise HookError(f"{plan.plugin} cannot compute its blocks with {name}", problems)
            named = {name: getattr(groups, name) for name in plan.group_names}
            return context_parallel_kernel(plan, inner, named, layer_index)

        return wrap
