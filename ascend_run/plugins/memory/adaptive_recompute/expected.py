"""What ``plan`` expects to be kept of each layer, where nothing is swapped. No torch.

A run chooses whole parts by their times. Here their FLOPs stand in for those, and bytes for norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ascend_run.ops.recompute_ahead.order import ScheduleOrder
from ascend_run.plugin_api import Layout, PipelineStage, RunConfig, SavedTensor
from ascend_run.plugins.memory import in_flight

from .solver import Choice, Kind, fullest, solve
from .treatment import PARTS, READERS, WHOLE, Treatment, treatments

_MLP: Final = ("mlp", "router", "dispatcher", "experts", "shared_experts")
_OF_PART: Final[Mapping[str, tuple[str, ...]]] = dict(
    zip(PARTS, (("input_norm",), ("self_attention",), ("mlp_norm",), _MLP), strict=True)
)
"""Part of a layer -> its parts in the cost model."""
_FLOPS_OF_A_BYTE: Final = 100.0
"""What matmuls compute in the time in which a byte is moved."""
_FLOPS_OF_A_CALL: Final = 2e6
"""What they compute on a CPU in the time that an operation takes beside its arithmetic."""
_CALLS: Final = dict(zip(PARTS, (3, 25, 3, 5), strict=True))
"""Part -> its operations, about."""
_STEPS: Final = 800
"""The cost of all layers, in units of the solver."""


def kept_tensors(
    budget: int, config: RunConfig, layout: Layout, rank: PipelineStage
) -> dict[int, tuple[str, ...]]:
    """Return layer -> the tensors that it is expected to keep beside its input.

    Args:
        budget: Of all layers of a rank, over their forwards in flight. Unit: bytes.
    """
    moments = _moments(config, layout, rank)
    alike: dict[tuple[tuple[SavedTensor, ...], tuple[int, ...]], list[int]] = {}
    for place, layer in enumerate(rank.layers):
        if layer in rank.saved:
            chunk = place * len(moments[0]) // len(rank.layers)
            counts = tuple(now[chunk] for now in moments)
            alike.setdefault((rank.saved[layer], counts), []).append(layer)
    spent = {layers[0]: _spent(config, layout, rank, layers[0]) for layers in alike.values()}
    unit = sum(sum(spent[layers[0]].values()) * len(layers) for layers in alike.values()) / _STEPS
    kinds = [
        Kind(tuple(choices(saved, spent[layers[0]], unit)), len(layers), counts)
        for (saved, counts), layers in alike.items()
    ]
    found = solve(kinds, budget)
    kept = dict[int, tuple[str, ...]]()
    for at, ((saved, _), layers) in enumerate(alike.items()):
        for number, layer in enumerate(layers):
            how = Treatment((WHOLE,)) if found is None else found[at][number].treatment
            kept[layer] = tuple(tensor.key for tensor in kept_beside_input(saved, how))
    return kept


def _moments(config: RunConfig, layout: Layout, rank: PipelineStage) -> list[tuple[int, ...]]:
    """Return the forwards in flight of each chunk, at each moment at which they may be the most."""
    if layout.vpp is None:
        return [(int(in_flight(config, layout, rank)),)]
    group = config.parallel.microbatch_group_size_per_vp_stage or layout.pp
    order = ScheduleOrder(layout.pp, rank.pp_rank, layout.vpp, group, rank.num_microbatches)
    found = set[tuple[int, ...]]()
    for step in range(len(order.forwards)):
        begun = [chunk for chunk, _ in order.forwards[: order.warm_up + step + 1]]
        ended = [chunk for chunk, _ in order.backwards[:step]]
        found.add(tuple(begun.count(c) - ended.count(c) for c in range(layout.vpp)))
    return fullest(found)


def choices(
    saved: Sequence[SavedTensor], spent: Mapping[str, float], unit: float
) -> Iterator[Choice]:
    """Yield what may become of a layer.

    Args:
        spent: See ``_spent``.
        unit: Of a choice's cost, in FLOPs.
    """
    for treatment in treatments(swaps=False):
        again = PARTS if WHOLE in treatment.recomputed else treatment.recomputed
        nbytes = saved[0].nbytes + sum(
            tensor.nbytes for tensor in kept_beside_input(saved, treatment)
        )
        cost = sum(max(1, round(spent[part] / unit)) for part in again)
        yield Choice(treatment, int(nbytes), cost)


def kept_beside_input(saved: Sequence[SavedTensor], treatment: Treatment) -> Iterator[SavedTensor]:
    """Yield what a layer keeps beside its input: of a part that is recomputed its input, unless
    that is the output of a norm that is recomputed, too."""
    if WHOLE in treatment.recomputed:
        return
    gone = {READERS[part] for part in treatment.recomputed if part in READERS}
    for part, names in _OF_PART.items():
        own = [tensor for tensor in saved if tensor.part in names]
        again = part in treatment.recomputed
        for at, tensor in enumerate(own):
            is_input = at == 0
            if tensor is not saved[0] and not (part in gone if is_input else again):
                yield tensor
    yield from (t for t in saved if all(t.part not in names for names in _OF_PART.values()))


def _spent(config: RunConfig, layout: Layout, rank: PipelineStage, layer: int) -> dict[str, float]:
    """Return part -> FLOPs of its forward, or as many as take the time of a norm's."""
    saved, model = rank.saved[layer], config.model
    sizes = {tensor.key: tensor.nbytes for tensor in saved}
    rows = dict.fromkeys((*_MLP, "self_attention"), float(rank.tokens))
    if "experts.input" in sizes:
        of_experts = sizes["experts.input"] / (model.hidden_size * rank.item_bytes)
        rows["experts"] = of_experts * layout.ep / model.num_moe_experts
    found = dict.fromkeys(PARTS, 2.0 * _FLOPS_OF_A_BYTE * saved[0].nbytes)
    for part in READERS.values():
        found[part] = sum(
            2.0 * p.numel * rows[p.part]
            for p in rank.parameters
            if p.layer == layer and p.is_matrix and p.part in _OF_PART[part]
        )
    if config.platform == "cpu":  # other devices have their work queued ahead
        found = {part: flops + _FLOPS_OF_A_CALL * _CALLS[part] for part, flops in found.items()}
    seen = config.data.seq_length / 2  # by a query, on the mean
    found["self_attention"] += 4.0 * rank.tokens * seen * rank.heads * rank.head_width
    return found
