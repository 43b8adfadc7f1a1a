"""What recomputation of experts changes: saved activations, communication and matmuls. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.types.config import RunConfig
from ascend_run.types.cost import (
    Communication,
    CostChange,
    Phase,
    PipelineStage,
    SavedChange,
    SavedTensor,
    Storage,
    WorkingMemory,
)
from ascend_run.types.layout import Layout

from .dispatcher_cost import own_tokens

_COMPUTED: Final = ("hidden", "activated", "product", "clamped", "sigmoid")
_WIDE: Final = 4
_INDEX: Final = 8


def recompute_cost(
    config: RunConfig,
    layout: Layout,
    rank: PipelineStage,
    *,
    layers: Sequence[int],
    keeping: Sequence[int],
    shared: bool,
) -> CostChange:
    """Return the change for some of a rank's layers with experts.

    Args:
        layers: Layers whose experts are recomputed.
        keeping: Those of them that keep the tokens of the experts.
        shared: Whether shared experts are recomputed, too.
    """
    parts = ("experts", "shared_experts") if shared else ("experts",)
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[layers[0]]}
    dropping = tuple(layer for layer in layers if layer not in keeping)
    computed = [f"{part}.{name}" for part in parts for name in _COMPUTED]
    computed += ["experts.weighted", "experts.replicas", "experts.adapted"]
    computed.append("experts.input")
    # Kept whether or not a weight's gradient needs it, so not as the input that others may drop.
    kept = SavedTensor(part="experts", name="tokens", nbytes=sizes["experts.input"])
    working = [
        WorkingMemory(
            part=part,
            name="recomputed",
            nbytes=sum(sizes.get(f"{part}.{name}", 0.0) for name in names),
            phase=Phase.BACKWARD,
        )
        for part, names in (
            ("experts", (*_COMPUTED, "weighted", *(["input"] if dropping else []))),
            ("shared_experts", _COMPUTED),
        )
        if part in parts
    ]
    runs = len(dropping) * rank.num_microbatches
    communication = [*_dispatch(config, layout, sizes, rank, runs)] if runs else []
    if shared:
        communication += _shared(config, layout, sizes, len(layers) * rank.num_microbatches)
    communication.append(_replicas(1 + len(layers) / len(rank.moe_layers)))
    return CostChange(
        saved=(SavedChange(tensors=tuple(computed), layers=tuple(layers), storage=Storage.NONE),),
        saved_added=(kept,),
        saved_added_layers=tuple(keeping),
        working=tuple(w for w in working if w.nbytes),
        communication=tuple(communication),
        flops=sum(_flops(config, layout, rank, layer, sizes, parts) for layer in layers),
    )


def _dispatch(
    config: RunConfig, layout: Layout, sizes: dict[str, float], rank: PipelineStage, runs: int
) -> Iterator[Communication]:
    """The way to the experts, once more."""
    model = config.model
    tokens = sizes["experts.input"] / layout.expt_tp
    rows = tokens / (model.hidden_size * rank.item_bytes)
    own, experts = own_tokens(config, layout, rank), model.num_moe_experts
    if model.moe_token_dispatcher_type == "allgather":
        if layout.ep * layout.expt_tp > 1:
            hidden = own * model.hidden_size * rank.item_bytes
            for name, nbytes in (
                ("choices", own * experts),
                ("weights", own * experts * _WIDE),
                ("tokens", hidden),
            ):
                yield _repeated("all_gather", "tp_ep", runs, nbytes, name)
        return
    if layout.ep > 1:
        yield _repeated("all_to_all", "ep", runs, tokens, "tokens")
        yield _repeated("all_to_all", "ep", runs, rows * _WIDE, "weights")
    if not model.moe_pad_expert_input_to_capacity and (layout.ep > 1 or layout.expt_tp > 1):
        yield _repeated("all_gather", "tp_ep", runs, experts * _INDEX, "counts")
    if layout.expt_tp > 1:
        yield _repeated("all_gather", "expt_tp", runs, tokens, "tokens of one expert")
        yield _repeated("all_gather", "expt_tp", runs, rows * _WIDE, "weights of one expert")


def _shared(
    config: RunConfig, layout: Layout, sizes: dict[str, float], runs: int
) -> Iterator[Communication]:
    """The gathering of the shared experts' input; their output too, if a gate reads it."""
    own = sizes.get("shared_experts.input")
    if own is None or layout.tp == 1:
        return
    scattered = config.parallel.sequence_parallel
    if scattered:
        yield _repeated("all_gather", "tp", runs, own, "input of the shared experts")
    if config.model.moe_shared_expert_gate:
        operation, factor = ("reduce_scatter", layout.tp) if scattered else ("all_reduce", 1)
        yield _repeated(operation, "tp", runs, own * factor, "output of the shared experts")


def _replicas(times: float) -> Communication:
    """The broadcasts of another plugin within the experts' forward, so many times."""
    return Communication(
        operation="broadcast",
        group="ep",
        calls=times,
        sent_bytes=times,
        why="experts, forward: *",
        overlapped=True,
        replaces="broadcast",
    )


def _repeated(operation: str, group: str, runs: int, nbytes: float, what: str) -> Communication:
    return Communication(
        operation=operation,
        group=group,
        calls=runs,
        sent_bytes=runs * nbytes,
        why=f"experts, recomputed: {what}",
    )


def _flops(
    config: RunConfig,
    layout: Layout,
    rank: PipelineStage,
    layer: int,
    sizes: dict[str, float],
    parts: Sequence[str],
) -> float:
    """The matmuls of the experts, and of shared ones if they are among the parts, once more."""
    model = config.model
    held = model.num_moe_experts / layout.ep
    rows: dict[str, float] = {
        "experts": sizes["experts.input"] / (model.hidden_size * rank.item_bytes) / held,
        "shared_experts": rank.tokens,
    }
    return sum(
        2 * p.numel * rows[p.part] * rank.num_microbatches
        for p in rank.parameters
        if p.layer == layer and p.part in parts and p.is_matrix
    )
