"""Dispatch and combine tokens on two ranks, forward and backward; prints one JSON line.

Permutation, all-to-all, order of the experts, and all of it back: ours and Megatron's dispatcher
alternate, with the same tokens, routing and gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from . import llama
from .expert_mlps_worker import difference
from .ring_worker import Step, all_ranks, join

# T tokens of a rank, H hidden size, X experts, K experts of a token

HIDDEN: Final = 512


def dispatchers(plugin: str, experts: int, topk: int) -> tuple[Any, Any]:
    """That of our plugin, and Megatron's of all-to-alls."""
    from .minimal_facade import megatron_on_the_cpu

    with megatron_on_the_cpu():
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe.token_dispatcher import (
            MoEAllGatherTokenDispatcher,
            MoEAlltoAllTokenDispatcher,
        )

    from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher
    from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher

    ranks = dist.get_world_size()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=8, num_moe_experts=experts,
        moe_router_topk=topk, moe_token_dispatcher_type="alltoall", add_bias_linear=False,
        expert_model_parallel_size=ranks,
    )  # fmt: skip
    local = experts // ranks
    own = list(range(dist.get_rank() * local, (dist.get_rank() + 1) * local))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    megatrons = MoEAlltoAllTokenDispatcher(local, own, config, groups)
    if plugin == "moe-allgather":
        inner = MoEAllGatherTokenDispatcher(local, own, config, groups)
        return AllGatherDispatcher(inner), megatrons
    return AllToAllDispatcher(megatrons, overlap=True, fused=True), megatrons


def step_of(dispatcher: Any, tokens: Tensor, probs: Tensor, routing: Tensor, dout: Tensor) -> Step:
    """A function that returns the output and the gradients of tokens and probs.

    Experts return their tokens, and the probs' gradient is the probs.
    """
    leaves = [x.clone().requires_grad_() for x in (tokens, probs)]

    def step() -> tuple[Tensor, ...]:
        rows, weights = dispatcher.dispatch_preprocess(leaves[0], routing, leaves[1])
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, _, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        out = dispatcher.combine_postprocess(rows)
        given = (dout, weights.detach())
        return out.detach(), *torch.autograd.grad((out, weights), leaves, given)

    return step


def one_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step, all of a system's in a pair before those of the other."""
    join(options)
    generator = torch.Generator().manual_seed(7 + options.rank)
    tokens, dout = torch.randn(2, options.tokens, HIDDEN, generator=generator)
    logits = torch.randn(options.tokens, options.experts, generator=generator)
    chosen = logits.topk(options.topk).indices
    routing = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
    probs = logits.softmax(-1) * routing
    dtype = llama.DTYPES[options.dtype]
    ours, megatrons = (
        step_of(dispatcher, tokens.to(dtype), probs, routing, dout.to(dtype))
        for dispatcher in dispatchers(options.plugin, options.experts, options.topk)
    )
    apart = difference(ours(), megatrons())
    seconds = []
    for _ in range(options.pairs):
        for step in (ours, megatrons):
            for _ in range(options.steps):
                dist.barrier()
                begin = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begin)
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "samples": {f"difference/{options.rank}": [apart]}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=("moe-alltoall", "moe-allgather"), required=True)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=llama.DTYPES, default="bf16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    made = all_ranks(sys.argv[1:], "dispatch_worker") if options.rank is None else one_rank(options)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
