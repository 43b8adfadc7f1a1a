"""How Megatron distributes a model over ``mp_rank_*`` folders. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import attrs

from ascend_run.plugin_api.errors import LayoutError

Slots: TypeAlias = tuple[int | None, ...]
"""Layer slot of a chunk -> global layer number; None: the slot is empty."""
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
    ep: int = 1
    expert_tp: int | None = None
    """None: as ``tp``."""
    layer_list: tuple[int, ...] = ()
    """Layer slots of each pipeline stage; empty: equally many."""
    empty_layers: tuple[int, ...] = ()
    """Slots without a layer, counted from 0 over the model."""
    tp_extend_ep: bool = False
    """Distribute whole experts over tensor-parallel ranks too (MindSpeed)."""


@attrs.frozen(kw_only=True)
class ShardLayout:
    """A layout of one model; all sizes are consistent."""

    tp: int
    ep: int
    expert_tp: int
    """Tensor-parallel size of experts; 1 with ``tp_extend_ep``."""
    tp_extend_ep: bool
    chunks: tuple[tuple[Slots, ...], ...]
    """Pipeline stage -> chunk -> slots."""

    @property
    def pp(self) -> int:
        return len(self.chunks)

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
    slots = num_layers + len(options.empty_layers)
    counts = _slot_counts(options, slots, problems)
    problems += _expert_problems(options, num_experts)
    if len({*options.empty_layers}) != len(options.empty_layers):
        problems.append(f"--empty-layers {_listed(options.empty_layers)} names a slot twice")
    if beyond := [n for n in options.empty_layers if n >= slots]:
        problems.append(
            f"--empty-layers {_listed(beyond)}: {num_layers} layers and "
            f"{len(options.empty_layers)} empty ones are slots 0 to {slots - 1}"
        )
    if problems:
        raise LayoutError("this model cannot be distributed like that", problems)
    numbers = _numbers(slots, options.empty_layers)
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    chunks = [numbers[end - count : end] for end, count in zip(ends, counts, strict=True)]
    extended = options.tp_extend_ep
    return ShardLayout(
        tp=options.tp,
        ep=options.ep,
        expert_tp=1 if extended else options.expert_tp or options.tp,
        tp_extend_ep=extended,
        chunks=tuple(tuple(chunks[stage :: options.pp]) for stage in range(options.pp)),
    )


def _slot_counts(options: LayoutOptions, slots: int, problems: list[str]) -> list[int]:
    """Return the slots of every virtual stage, in model order."""
    stages = options.pp * options.vpp
    if not options.layer_list:
        if slots % stages:
            vpp = f" * vpp={options.vpp}" if options.vpp > 1 else ""
            problems.append(
                f"{slots} layer slots are not divisible by pp={options.pp}{vpp}; name the layers "
                "of each stage with --layer-list, or fill up with --empty-layers"
            )
        return [slots // stages] * stages
    listed = _listed(options.layer_list)
    if options.vpp > 1:
        problems.append(f"--layer-list {listed} with --vpp {options.vpp}: use one of them")
    if len(options.layer_list) != options.pp:
        problems.append(
            f"--layer-list {listed} is of {len(options.layer_list)} stages, not of pp={options.pp}"
        )
    if sum(options.layer_list) != slots:
        problems.append(
            f"--layer-list {listed} has {sum(options.layer_list)} layer slots; the "
            f"model has {slots}"
        )
    return list(options.layer_list)


def _expert_problems(options: LayoutOptions, num_experts: int | None) -> Iterator[str]:
    if num_experts is None:
        if options.ep > 1 or options.expert_tp or options.tp_extend_ep:
            yield "--ep, --expert-tp and --tp-extend-ep are for models with experts"
        return
    shards = options.ep * (options.tp if options.tp_extend_ep else 1)
    if num_experts % shards:
        yield f"{num_experts} experts are not divisible by {shards} (ep={options.ep})"
    if options.expert_tp and options.tp_extend_ep:
        yield "--expert-tp with --tp-extend-ep: the latter leaves experts whole; use one of them"
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
