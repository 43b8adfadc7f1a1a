"""How Megatron distributes a model over ``mp_rank_*`` folders. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from ascend_run.plugin_api.errors import LayoutError

Slots: TypeAlias = tuple[int | None, ...]
"""Layer slot of a chunk -> global layer number; None: the slot is empty."""
DUALPIPEV: Final = "dualpipev"
"""Value of MindSpeed's ``--schedules-method``."""
FOLDER: Final = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@attrs.frozen(order=True)
class Rank:
    """One folder of a checkpoint."""

    tp: int
    pp: int = 0
    ep: int = 0


@attrs.frozen(kw_only=True)
class LayoutOptions:
    """The layout that a user asks for."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of layers per pipeline stage."""
    schedules_method: str | None = None
    """``dualpipev``: two chunks per stage, placed in the order of a V (MindSpeed)."""
    ep: int = 1
    expert_tp: int | None = None
    """None: as ``tp``."""
    num_layer_list: tuple[int, ...] = ()
    """Layer slots of each pipeline stage; empty: equally many."""
    noop_layers: tuple[int, ...] = ()
    """Slots without a layer, counted from 0 over the model."""
    moe_tp_extend_ep: bool = False
    """Distribute whole experts over tensor-parallel ranks too (MindSpeed)."""


@attrs.frozen(kw_only=True)
class ShardLayout:
    """A layout of one model; all sizes are consistent."""

    tp: int
    ep: int
    expert_tp: int
    """Tensor-parallel size of experts; 1 with ``tp_extend_ep``."""
    tp_extend_ep: bool
    pp: int
    chunks: Mapping[tuple[int, int], Slots]
    """(pipeline stage, chunk) -> slots, in model order."""

    @property
    def last(self) -> tuple[int, int]:
        """The (pipeline stage, chunk) with the final norm and the output layer."""
        return [*self.chunks][-1]

    @property
    def chunks_per_stage(self) -> int:
        return len(self.chunks) // self.pp

    @property
    def expert_shards(self) -> int:
        """Number of groups that the experts are divided into."""
        return self.ep * self.tp if self.tp_extend_ep else self.ep

    def expert_shard(self, rank: Rank) -> int:
        return rank.ep * self.tp + rank.tp if self.tp_extend_ep else rank.ep

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank that has a folder."""
        for pp in range(self.pp):
            for tp, ep in sorted(self.rank_pairs()):
                yield Rank(tp, pp, ep)

    def rank_pairs(self) -> set[tuple[int, int]]:
        """Return the pairs of tensor- and expert-parallel rank that exist.

        Megatron numbers the ranks of dense and of expert layers apart, the tensor-parallel rank
        first in both. If the two tensor-parallel sizes differ, not every pair exists.
        """
        return rank_pairs(self.tp, self.ep, self.tp if self.tp_extend_ep else self.expert_tp)

    def folder(self, rank: Rank) -> str:
        parts = [f"mp_rank_{rank.tp:02d}"]
        parts += [f"{rank.pp:03d}"] if self.pp > 1 else []
        parts += [f"{rank.ep:03d}"] if self.ep > 1 else []
        return "_".join(parts)


def rank_pairs(tp: int, ep: int, expert_tp: int) -> set[tuple[int, int]]:
    """Return the (tensor-parallel, expert-parallel) ranks of a run with these sizes."""
    return {(n % tp, n // expert_tp % ep) for n in range(math.lcm(tp, expert_tp * ep))}


def shard_layout(options: LayoutOptions, num_layers: int, num_experts: int | None) -> ShardLayout:
    """Distribute a model.

    Args:
        num_layers: Layers of the model, without empty slots.
        num_experts: Experts of a layer; None: the model is dense.

    Raises:
        LayoutError: Layers or experts are not divisible, or options contradict each other.
    """
    problems: list[str] = []
    slots = num_layers + len(options.noop_layers)
    counts = _slot_counts(options, slots, problems)
    problems += _expert_problems(options, num_experts)
    if len({*options.noop_layers}) != len(options.noop_layers):
        problems.append(f"--noop-layers {_listed(options.noop_layers)} names a slot twice")
    if beyond := [n for n in options.noop_layers if n >= slots]:
        problems.append(
            f"--noop-layers {_listed(beyond)}: {num_layers} layers and "
            f"{len(options.noop_layers)} empty ones are slots 0 to {slots - 1}"
        )
    if problems:
        raise LayoutError("this model cannot be distributed like that", problems)
    numbers = _numbers(slots, options.noop_layers)
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    chunks = [numbers[end - count : end] for end, count in zip(ends, counts, strict=True)]
    order = chunk_order(options.pp, _chunks_per_stage(options), options.schedules_method)
    extended = options.moe_tp_extend_ep
    return ShardLayout(
        tp=options.tp,
        ep=options.ep,
        expert_tp=1 if extended else options.expert_tp or options.tp,
        tp_extend_ep=extended,
        pp=options.pp,
        chunks=dict(zip(order, chunks, strict=True)),
    )


def chunk_order(pp: int, chunks: int, schedules_method: str | None) -> list[tuple[int, int]]:
    """Return the (pipeline stage, chunk) pairs in the order of their layers.

    Args:
        chunks: Chunks per stage.
        schedules_method: ``dualpipev``: the second chunks are in reverse order of the stages, so
            that stage 0 has the first and the last layers.
    """
    stages = range(pp)
    if schedules_method == DUALPIPEV:
        return [*((stage, 0) for stage in stages), *((stage, 1) for stage in reversed(stages))]
    return [(stage, chunk) for chunk in range(chunks) for stage in stages]


def _chunks_per_stage(options: LayoutOptions) -> int:
    return 2 if options.schedules_method == DUALPIPEV else options.vpp


def _slot_counts(options: LayoutOptions, slots: int, problems: list[str]) -> list[int]:
    """Return the slots of every virtual stage, in model order."""
    chunks = _chunks_per_stage(options)
    stages = options.pp * chunks
    if options.schedules_method == DUALPIPEV and options.vpp not in (1, 2):
        problems.append(
            f"--schedules-method dualpipev has 2 chunks per stage, not --vpp {options.vpp}"
        )
    if not options.num_layer_list:
        if slots % stages:
            vpp = f" * vpp={chunks}" if chunks > 1 else ""
            problems.append(
                f"{slots} layer slots are not divisible by pp={options.pp}{vpp}; name the layers "
                "of each stage with --num-layer-list, or fill up with --noop-layers"
            )
        return [slots // stages] * stages
    listed = _listed(options.num_layer_list)
    if chunks > 1:
        problems.append(
            f"--num-layer-list {listed} with {chunks} chunks per stage (--vpp, "
            "--schedules-method): use one of them"
        )
    if len(options.num_layer_list) != options.pp:
        problems.append(
            f"--num-layer-list {listed} is of {len(options.num_layer_list)} stages, not of "
            f"pp={options.pp}"
        )
    if sum(options.num_layer_list) != slots:
        problems.append(
            f"--num-layer-list {listed} has {sum(options.num_layer_list)} layer slots; the "
            f"model has {slots}"
        )
    return list(options.num_layer_list)


def _expert_problems(options: LayoutOptions, num_experts: int | None) -> Iterator[str]:
    if num_experts is None:
        if options.ep > 1 or options.expert_tp or options.moe_tp_extend_ep:
            yield "--ep, --expert-tp and --moe-tp-extend-ep are for models with experts"
        return
    shards = options.ep * (options.tp if options.moe_tp_extend_ep else 1)
    if num_experts % shards:
        yield f"{num_experts} experts are not divisible by {shards} (ep={options.ep})"
    if options.expert_tp and options.moe_tp_extend_ep:
        yield (
            "--expert-tp with --moe-tp-extend-ep: the latter leaves experts whole; use one of them"
        )
    if options.expert_tp and options.tp % options.expert_tp:
        yield (
            f"--expert-tp {options.expert_tp} does not divide tp={options.tp}; the names of the "
            "folders tell only ranks of the latter apart"
        )


def _numbers(slots: int, empty: Sequence[int]) -> Slots:
    layer = iter(range(slots))
    return tuple(None if slot in empty else next(layer) for slot in range(slots))


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
