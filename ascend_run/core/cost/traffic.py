"""Messages of the plain model in one step, by process group: what one rank puts in.

The rules are Megatron's: tensor parallelism with and without sequence parallelism, both of its
dispatchers, one reduction of each buffer of gradients, and hidden states between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import Messages, ParameterCost
from ascend_run.plugin_api.layout import Layout

from .kept import hidden_bytes
from .sizes import Sizes
from .state import WIDE, bucket_size, buffer_numel, keeps_own_gradients

_INDEX = 8


def _times(
    operation: str, group: str, calls: float, nbytes: float, why: str, *, hidden: bool = False
) -> Messages:
    """Messages of ``nbytes`` each."""
    return Messages(
        operation=operation,
        group=group,
        calls=calls,
        sent_bytes=calls * nbytes,
        why=why,
        hidden=hidden,
    )


def layer_forward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> dict[str, list[Messages]]:
    """Part of a layer -> messages of its forward over all micro-batches of a step."""
    runs = sizes.num_micro_batches
    found = {"self_attention": list(_entry(config, layout, sizes, runs, "attention"))}
    found["self_attention"] += _exit(config, layout, sizes, runs, "attention")
    if not moe:
        found["mlp"] = list(_entry(config, layout, sizes, runs, "feed-forward"))
        found["mlp"] += _exit(config, layout, sizes, runs, "feed-forward")
        return found
    dispatch = _gathered if _gathers(config) else _dispatched
    found["dispatcher"] = list(dispatch(layout, sizes, runs, "forward"))
    return found


def layer_backward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> Iterator[Messages]:
    """Of one layer, over all micro-batches of a step."""
    runs, parts = sizes.num_micro_batches, ("attention",) if moe else ("attention", "feed-forward")
    part, whole = hidden_bytes(sizes), sizes.tokens * sizes.hidden * sizes.item_bytes
    for name in parts if layout.tp > 1 else ():
        why = f"{name}, backward"
        if config.parallel.sequence_parallel:
            # The gradient that leaves, and once more the input of the first product.
            yield _times("all_gather", "tp", 2 * runs, part, why)
            yield _times("reduce_scatter", "tp", runs, whole, why)
        else:
            yield _times("all_reduce", "tp", runs, whole, why)
    if moe and _gathers(config):
        yield from _gathered(layout, sizes, runs, "backward")
    elif moe:
        counts = "all_gather"
        found = _dispatched(layout, sizes, runs, "backward")
        yield from (m for m in found if m.operation != counts)


def _entry(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int, why: str
) -> Iterator[Messages]:
    if layout.tp > 1 and config.parallel.sequence_parallel:
        yield _times("all_gather", "tp", runs, hidden_bytes(sizes), f"{why}, forward")


def _exit(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int, why: str
) -> Iterator[Messages]:
    if layout.tp > 1:
        whole = sizes.tokens * sizes.hidden * sizes.item_bytes
        operation = "reduce_scatter" if config.parallel.sequence_parallel else "all_reduce"
        yield _times(operation, "tp", runs, whole, f"{why}, forward")


def _gathers(config: RunConfig) -> bool:
    return bool(config.model.moe_token_dispatcher_type == "allgather")


def _gathered(layout: Layout, sizes: Sizes, runs: int, direction: str) -> Iterator[Messages]:
    """All tokens of all ranks that share experts to each of them, and the sums of outputs back."""
    ranks = layout.ep * layout.expt_tp
    if ranks == 1:
        return
    tokens, why = sizes.shared_tokens, f"experts, {direction}"
    hidden, weights = tokens * sizes.hidden, tokens * sizes.all_experts * WIDE
    if direction == "forward":
        yield _times("all_gather", "tp_ep", runs, tokens * sizes.all_experts, f"{why}: choices")
        yield _times("all_gather", "tp_ep", runs, weights, f"{why}: weights")
        yield _times("all_gather", "tp_ep", runs, hidden * sizes.item_bytes, f"{why}: tokens")
        yield _times("reduce_scatter", "tp_ep", runs, ranks * hidden * WIDE, f"{why}: outputs")
        return
    yield _times("all_gather", "tp_ep", runs, hidden * WIDE, f"{why}: outputs")
    whole = ranks * hidden * sizes.item_bytes
    yield _times("reduce_scatter", "tp_ep", runs, whole, f"{why}: tokens")
    yield _times("reduce_scatter", "tp_ep", runs, ranks * weights, f"{why}: weights")


def _dispatched(layout: Layout, sizes: Sizes, runs: int, direction: str) -> Iterator[Messages]:
    """Tokens and their weights to the experts, and the outputs back."""
    tokens = sizes.expert_tokens * sizes.hidden * sizes.item_bytes
    weights = sizes.expert_tokens * WIDE
    why = f"experts, {direction}"
    if layout.ep > 1:
        yield _times("all_to_all", "ep", 2 * runs, tokens, f"{why}: tokens")
        yield _times("all_to_all", "ep", runs, weights, f"{why}: weights")
    if layout.ep > 1 or layout.expt_tp > 1:
        counts = sizes.all_experts * _INDEX
        yield _times("all_gather", "tp_ep", runs, counts, f"{why}: counts")
    if layout.expt_tp > 1:
        gather, scatter = ("all_gather", "reduce_scatter")
        rows = sizes.expert_rows * sizes.hidden * sizes.item_bytes
        yield _times(gather, "expt_tp", runs, tokens, f"{why}: tokens of one expert")
        yield _times(gather, "expt_tp", runs, weights, f"{why}: weights of one expert")
        yield _times(scatter, "expt_tp", runs, rows, f"{why}: outputs of one expert")


def ends(
    config: RunConfig, layout: Layout, sizes: Sizes, *, is_first: bool, is_last: bool
) -> Iterator[Messages]:
    """The embedding and the loss under tensor parallelism."""
    if layout.tp == 1:
        return
    runs, sequence_parallel = sizes.num_micro_batches, config.parallel.sequence_parallel
    part, whole = hidden_bytes(sizes), sizes.tokens * sizes.hidden * sizes.item_bytes
    if is_first:
        operation = "reduce_scatter" if sequence_parallel else "all_reduce"
        yield _times(operation, "tp", runs, whole, "embedding, forward")
        if sequence_parallel:
            yield _times("all_gather", "tp", runs, part, "embedding, backward")
    if is_last:
        if sequence_parallel:
            yield _times("all_gather", "tp", runs, part, "loss, forward")
            yield _times("reduce_scatter", "tp", runs, whole, "loss, backward")
        else:
            yield _times("all_reduce", "tp", runs, whole, "loss, backward")
        yield _times("all_reduce", "tp", 3 * runs, sizes.tokens * WIDE, "loss: softmax")


def between_stages(layout: Layout, sizes: Sizes, pp_rank: int, chunks: int) -> Iterator[Messages]:
    """Hidden states to the next stage, their gradients to the one before."""
    if layout.pp == 1:
        return
    runs, last = sizes.num_micro_batches, layout.pp - 1
    forward = chunks - (pp_rank == last)
    backward = chunks - (pp_rank == 0)
    if forward:
        yield _times("send", "pp", runs * forward, hidden_bytes(sizes), "to the next stage")
    if backward:
        yield _times("send", "pp", runs * backward, hidden_bytes(sizes), "to the stage before")


def gradients(
    config: RunConfig, layout: Layout, sizes: Sizes, parameters: Sequence[ParameterCost]
) -> Iterator[Messages]:
    """What the ranks that hold the same parameters reduce and gather once a step."""
    trained = [p for p in parameters if p.trained]
    overlaps = config.ddp.overlap_grad_reduce
    if not keeps_own_gradients(config, layout, sizes.num_micro_batches):
        for is_expert, group, ranks in (
            (False, "dp_cp", layout.dp * layout.cp),
            (True, "expt_dp", layout.expt_dp),
        ):
            own = [p for p in trained if p.is_expert is is_expert]
            if ranks > 1 and own:
                yield from _reduction(config, sizes, own, group, ranks, overlaps=overlaps)
    if layout.tp > 1 and config.parallel.sequence_parallel:
        shared = sum(p.numel for p in trained if _is_of_a_sequence_part(p)) * WIDE
        yield _times("all_reduce", "tp", 1, shared, "gradients of norms and routers")
    if layout.pp > 1 and (tied := [p for p in trained if p.is_shared_embedding]):
        nbytes = sum(p.numel for p in tied) * WIDE
        yield _times("all_reduce", "embd", 1, nbytes, "gradient of the tied embedding")


def _is_of_a_sequence_part(parameter: ParameterCost) -> bool:
    return parameter.part == "router" or "norm" in parameter.key


def _reduction(
    config: RunConfig,
    sizes: Sizes,
    own: Sequence[ParameterCost],
    group: str,
    ranks: int,
    *,
    overlaps: bool,
) -> Iterator[Messages]:
    numel = sum(p.numel for p in own)
    bucket = bucket_size(config, ranks)
    calls = 1 if bucket is None else max(1, -(-numel // bucket))
    if not config.ddp.use_distributed_optimizer:
        yield _times("all_reduce", group, calls, numel * WIDE / calls, "gradients", hidden=overlaps)
        return
    padded = buffer_numel(own, ranks, config)
    yield _times(
        "reduce_scatter", group, calls, padded * WIDE / calls, "gradients", hidden=overlaps
    )
    yield _times(
        "all_gather",
        group,
        calls,
        padded * sizes.item_bytes / ranks / calls,
        "parameters",
        hidden=config.ddp.overlap_param_gather,
    )
