"""Communication volume of the plain model in one step on one rank, by process group.

Follows Megatron: tensor parallelism with and without sequence parallelism, both token dispatchers,
one reduction per gradient bucket, and hidden states between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ascend_run.plugin_api.contracts import Communication, ParameterCost
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .latent_traffic import latent_backward, latent_forward
from .saved import gathered_heads, hidden_bytes, stream_bytes
from .sizes import Sizes
from .state import WIDE, bucket_size, buckets, by_chunk, keeps_own_gradients
from .volume import volume

_INDEX = 8


def layer_forward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool
) -> dict[str, list[Communication]]:
    """Return part of a layer -> communication of its forward over all micro-batches of a step."""
    runs = sizes.num_microbatches
    found = {
        "self_attention": list(
            latent_forward(config, layout, sizes, runs)
            if sizes.key_latent
            else _entry(config, layout, sizes, runs, "attention")
        )
    }
    if whole := gathered_heads(layout, sizes):
        own = volume("all_gather", "tp", runs, whole / layout.tp, "shared key-value heads, forward")
        found["self_attention"].append(own)
    found["self_attention"] += _exit(config, layout, sizes, runs, "attention")
    if not moe:
        found["mlp"] = list(_entry(config, layout, sizes, runs, "feed-forward"))
        found["mlp"] += _exit(config, layout, sizes, runs, "feed-forward")
        return found
    dispatch = _gathered if _gathers(config) else _dispatched
    found["dispatcher"] = list(dispatch(layout, sizes, runs, "forward"))
    if sizes.shared_ffn:
        found["shared_experts"] = list(_entry(config, layout, sizes, runs, "shared experts"))
        found["shared_experts"] += _exit(config, layout, sizes, runs, "shared experts")
    return found


def layer_backward(
    config: RunConfig, layout: Layout, sizes: Sizes, *, moe: bool, trained: Collection[str]
) -> Iterator[Communication]:
    """Yield the backward communication of one layer, over all micro-batches of a step.

    Args:
        trained: ``part.name`` of its trained parameters.
    """
    runs, parts = sizes.num_microbatches, ["attention"]
    if not moe or sizes.shared_ffn:
        parts.append("shared experts" if moe else "feed-forward")
    first = {
        "attention": "self_attention.linear_qkv",
        "feed-forward": "mlp.linear_fc1",
        "shared experts": "shared_experts.linear_fc1",
    }
    part, whole = hidden_bytes(sizes), sizes.tokens * sizes.hidden * sizes.item_bytes
    if sizes.key_latent:
        parts.remove("attention")
        yield from latent_backward(config, layout, sizes, runs, trained)
    if whole_heads := gathered_heads(layout, sizes):
        why = "shared key-value heads, backward"
        yield volume("reduce_scatter", "tp", runs, whole_heads, why)
    for name in parts if layout.tp > 1 else ():
        why, trains = f"{name}, backward", first[name] in trained
        leaving = why if trains else f"{why}: frozen"
        if config.parallel.sequence_parallel:
            # The output gradient, and the input of the first linear again for its weight gradient.
            yield volume("all_gather", "tp", runs, part, why)
            if trains:
                yield volume("all_gather", "tp", runs, part, f"{why}: input")
            yield volume("reduce_scatter", "tp", runs, whole, leaving)
        else:
            yield volume("all_reduce", "tp", runs, whole, leaving)
    if moe and _gathers(config):
        yield from _gathered(layout, sizes, runs, "backward")
    elif moe:
        yield from _dispatched(layout, sizes, runs, "backward")


def _entry(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int, why: str
) -> Iterator[Communication]:
    if layout.tp > 1 and config.parallel.sequence_parallel:
        yield volume("all_gather", "tp", runs, hidden_bytes(sizes), f"{why}, forward")


def _exit(
    config: RunConfig, layout: Layout, sizes: Sizes, runs: int, why: str
) -> Iterator[Communication]:
    if layout.tp > 1:
        whole = sizes.tokens * sizes.hidden * sizes.item_bytes
        operation = "reduce_scatter" if config.parallel.sequence_parallel else "all_reduce"
        yield volume(operation, "tp", runs, whole, f"{why}, forward")


def _gathers(config: RunConfig) -> bool:
    return bool(config.model.moe_token_dispatcher_type == "allgather")


def _gathered(layout: Layout, sizes: Sizes, runs: int, direction: str) -> Iterator[Communication]:
    """All-gather the tokens over the ranks of the experts, and reduce-scatter the outputs."""
    ranks = layout.ep * layout.expt_tp
    if ranks == 1:
        return
    tokens, why = sizes.shared_tokens, f"experts, {direction}"
    hidden, weights = tokens * sizes.hidden, tokens * sizes.all_experts * WIDE
    if direction == "forward":
        yield volume("all_gather", "tp_ep", runs, tokens * sizes.all_experts, f"{why}: choices")
        yield volume("all_gather", "tp_ep", runs, weights, f"{why}: weights")
        yield volume("all_gather", "tp_ep", runs, hidden * sizes.item_bytes, f"{why}: tokens")
        yield volume("reduce_scatter", "tp_ep", runs, ranks * hidden * WIDE, f"{why}: outputs")
        return
    yield volume("all_gather", "tp_ep", runs, hidden * WIDE, f"{why}: outputs")
    whole = ranks * hidden * sizes.item_bytes
    yield volume("reduce_scatter", "tp_ep", runs, whole, f"{why}: tokens")
    yield volume("reduce_scatter", "tp_ep", runs, ranks * weights, f"{why}: weights")


def _dispatched(layout: Layout, sizes: Sizes, runs: int, direction: str) -> Iterator[Communication]:
    """All-to-all of tokens and weights to the experts and of outputs back; reversed in backward."""
    tokens = sizes.expert_tokens * sizes.hidden * sizes.item_bytes
    weights = sizes.expert_tokens * WIDE
    why, forward = f"experts, {direction}", direction == "forward"
    if layout.ep > 1:
        yield volume("all_to_all", "ep", 2 * runs, tokens, f"{why}: tokens")
        yield volume("all_to_all", "ep", runs, weights, f"{why}: weights")
    if forward and not sizes.pads and (layout.ep > 1 or layout.expt_tp > 1):
        counts = sizes.all_experts * _INDEX
        yield volume("all_gather", "tp_ep", runs, counts, f"{why}: counts")
    if layout.expt_tp > 1:
        there, back = (
            ("all_gather", "reduce_scatter") if forward else ("reduce_scatter", "all_gather")
        )
        # Gathered over the ranks of an expert's tensor parallelism.
        of_all = 1 if forward else layout.expt_tp
        # Partial outputs are summed in the dtype of the weights.
        rows = sizes.hidden * weights * (layout.expt_tp if forward else 1)
        yield volume(there, "expt_tp", runs, tokens * of_all, f"{why}: tokens of one expert")
        yield volume(there, "expt_tp", runs, weights * of_all, f"{why}: weights of one expert")
        yield volume(back, "expt_tp", runs, rows, f"{why}: outputs of one expert")


def ends(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    *,
    lookups: int,
    losses: int,
    trained: Collection[str],
) -> Iterator[Communication]:
    """Yield the communication of the embedding and the loss under tensor parallelism.

    Args:
        lookups: How often a micro-batch is embedded on this stage; 0 without the embedding.
        losses: How many losses it has on this stage.
        trained: ``part.name`` of the trained parameters outside the layers.
    """
    if layout.tp == 1:
        return
    sequence_parallel = config.parallel.sequence_parallel
    part, whole = hidden_bytes(sizes), sizes.tokens * sizes.hidden * sizes.item_bytes
    if runs := sizes.num_microbatches * lookups:
        # With learned positions the sum is all-reduced, and scattered afterwards.
        added = config.model.position_embedding_type == "learned_absolute"
        scatters = sequence_parallel and not added
        operation = "reduce_scatter" if scatters else "all_reduce"
        yield volume(operation, "tp", runs, whole, "embedding, forward")
        if sequence_parallel and "embedding.word_embeddings" in trained:
            yield volume("all_gather", "tp", runs, part, "embedding, backward")
    if runs := sizes.num_microbatches * losses:
        if sequence_parallel:
            yield volume("all_gather", "tp", runs, part, "loss, forward")
        if config.model.num_labels:  # every rank has all of the head
            return
        if sequence_parallel:
            yield volume("reduce_scatter", "tp", runs, whole, "loss, backward")
        else:
            yield volume("all_reduce", "tp", runs, whole, "loss, backward")
        yield volume("all_reduce", "tp", 3 * runs, sizes.tokens * WIDE, "loss: softmax")


def between_stages(
    layout: Layout, sizes: Sizes, pp_rank: int, chunks: int
) -> Iterator[Communication]:
    """Yield the sends of hidden states to the next stage and of gradients to the previous one."""
    if layout.pp == 1:
        return
    runs, last = sizes.num_microbatches, layout.pp - 1
    forward = chunks - (pp_rank == last)
    backward = chunks - (pp_rank == 0)
    if forward:
        yield volume("send", "pp", runs * forward, stream_bytes(sizes), "to the next stage")
    if backward:
        yield volume("send", "pp", runs * backward, stream_bytes(sizes), "to the stage before")


def gradients(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    parameters: Sequence[ParameterCost],
    *,
    pp_rank: int,
    chunks: Sequence[Sequence[int]],
) -> Iterator[Communication]:
    """Yield the gradient reductions and parameter all-gathers of a step."""
    trained = [p for p in parameters if p.trained]
    if not keeps_own_gradients(config, layout, sizes.num_microbatches):
        limit = bucket_size(config, layout, pp_rank)
        for is_expert, group, ranks in (
            (False, "dp_cp", layout.dp * layout.cp),
            (True, "expt_dp", layout.expt_dp),
        ):
            if ranks > 1:
                own = [p for p in trained if p.is_expert is is_expert]
                parts = by_chunk(own, chunks, is_first=pp_rank == 0)
                yield from _reduction(config, sizes, parts, group, ranks, limit)
    if layout.tp > 1 and config.parallel.sequence_parallel:
        shared = sum(p.numel for p in trained if p.sees_own_tokens) * WIDE
        if shared:
            yield volume("all_reduce", "tp", 1, shared, "gradients of norms and routers")
    if layout.pp > 1 and (tied := [p for p in trained if p.is_shared_embedding]):
        nbytes = sum(p.numel for p in tied) * WIDE
        yield volume("all_reduce", "embd", 1, nbytes, "gradient of the shared embedding")


def _reduction(
    config: RunConfig,
    sizes: Sizes,
    own: Sequence[Sequence[ParameterCost]],
    group: str,
    ranks: int,
    limit: int | None,
) -> Iterator[Communication]:
    """One reduction per bucket of each chunk's gradient buffer."""
    options = config.ddp
    spread, overlaps = options.use_distributed_optimizer, options.overlap_grad_reduce
    found = [numel for part in own for numel in buckets(part, ranks, limit, spread=spread)]
    if not found:
        return
    calls, numel = len(found), sum(found)
    operation = "reduce_scatter" if spread else "all_reduce"
    yield volume(operation, group, calls, numel * WIDE / calls, "gradients", overlapped=overlaps)
    if spread:
        own_bytes = numel * sizes.item_bytes / ranks
        hidden = options.overlap_param_gather
        yield volume("all_gather", group, calls, own_bytes / calls, "parameters", overlapped=hidden)
