"""Faults planted in the code that runs, on the ranks: each answers what undoes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import torch

Undo = Callable[[], None]
REDUCTION = "megatron.core.distributed.finalize_model_grads"
"""A module that its package hides behind a function of the same name."""


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> Undo:
    """Put what ``change`` makes of an attribute in its place."""
    held, inner = vars(owner).get(name, getattr(owner, name)), getattr(owner, name)
    setattr(owner, name, change(inner))
    return lambda: setattr(owner, name, held)  # a static method as one


def halve_every_gradient() -> Undo:
    from ascend_run.core.train import step

    def change(inner: Any) -> Any:
        def finalize(model: Any, *args: Any, **kwargs: Any) -> None:
            inner(model, *args, **kwargs)
            for chunk in model:
                chunk.scale_gradients(0.5)

        return finalize

    return replace(step, "finalize_model_grads", change)


def double_a_gradient_of_the_third_step() -> Undo:
    """Of the last layer's attention; the first batch does not show it."""
    from ascend_run.core.train import step

    def change(inner: Any) -> Any:
        def finalize(model: Any, *args: Any, **kwargs: Any) -> None:
            inner(model, *args, **kwargs)
            for chunk in model:
                chunk.num_finalized = getattr(chunk, "num_finalized", 0) + 1
                if chunk.num_finalized == 3:
                    attention = chunk.module.decoder.layers[-1].self_attention
                    attention.linear_proj.weight.main_grad.mul_(2.0)

        return finalize

    return replace(step, "finalize_model_grads", change)


def drop_the_last_micro_batch() -> Undo:
    from ascend_run.core.train.step import ForwardBackward

    def change(inner: Any) -> Any:
        return lambda self, batches, count, **how: inner(self, batches, count - 1, **how)

    return replace(ForwardBackward, "__call__", change)


def keep_norm_gradients_to_oneself() -> Undo:
    module = importlib.import_module(REDUCTION)
    name = "_allreduce_non_tensor_model_parallel_grads"
    return replace(module, name, lambda inner: lambda *args, **kwargs: None)


def untie() -> Undo:
    module = importlib.import_module(REDUCTION)
    name = "_allreduce_word_embedding_grads"
    return replace(module, name, lambda inner: lambda *args, **kwargs: None)


def swap_the_gate_and_what_it_gates() -> Undo:
    from megatron.core.transformer.mlp import MLP

    def change(inner: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            column = self.linear_fc1
            hook = column.register_forward_hook(
                lambda module, given, out: (torch.cat(out[0].chunk(2, -1)[::-1], -1), out[1])
            )
            try:
                return inner(self, *args, **kwargs)
            finally:
                hook.remove()

        return forward

    return replace(MLP, "forward", change)


def step_twice_as_far() -> Undo:
    from ascend_run.core.train import optimizer

    def change(inner: Any) -> Any:
        def group(parameters: Any, config: Any, **kind: Any) -> Any:
            return {**inner(parameters, config, **kind), "max_lr": 2 * config.optimizer.lr}

        return group

    return replace(optimizer, "_group", change)


def draw_alike_on_tensor_parallel_ranks() -> Undo:
    from ascend_run.core.train import seeding

    def change(inner: Any) -> Any:
        return lambda seed: inner(seed, tp_rank=0, ep_rank=0, etp_rank=0)

    return replace(seeding, "model_parallel_cuda_manual_seed", change)


def cut_adapters_off() -> Undo:
    """Their product is added, and no gradient comes back through it."""
    from ascend_run.plugins.fine_tuning.lora.adapter import Adapter

    def change(inner: Any) -> Any:
        return lambda self, *args, **kwargs: inner(self, *args, **kwargs).detach()

    return replace(Adapter, "forward", change)


def cut_adapters_of_experts_off() -> Undo:
    """Their products are added to the weights, and no gradient comes back through them."""
    from ascend_run.plugins.fine_tuning.lora.expert_adapter import ExpertAdapter

    def change(inner: Any) -> Any:
        def factors(self: Any, part: str) -> Any:
            return tuple(0.0 * factor + factor.detach() for factor in inner(self, part))

        return factors

    return replace(ExpertAdapter, "_factors", change)


def mix_up_the_gradient_of_values() -> Undo:
    """Gradients of the values go to the wrong positions."""
    from ascend_run.core.model import attention

    def change(inner: Any) -> Any:
        def attend(kernel: Any, q: Any, k: Any, v: Any, spec: Any) -> Any:
            v.register_hook(lambda gradient: gradient.roll(1, 0))
            return inner(kernel, q, k, v, spec)

        return attend

    return replace(attention, "attend", change)


def count_padding_too() -> Undo:
    """The reported loss is of another number of tokens; gradients stay right."""
    from ascend_run.core.train.step import ForwardBackward

    def change(inner: Any) -> Any:
        return lambda self, reports: inner(self, reports) * torch.tensor([1.0, 1.01]).double()

    return replace(ForwardBackward, "_total", change)


def train_what_is_frozen() -> Undo:
    from ascend_run.core.train.step import TrainStep

    def change(inner: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            result = inner(self, *args)
            with torch.no_grad():
                for chunk in self.bundle.chunks:
                    for parameter in chunk.parameters():
                        if not parameter.requires_grad:
                            parameter.mul_(1.001)
            return result

        return call

    return replace(TrainStep, "__call__", change)


def reorder_experts() -> Undo:
    """The first two experts of a rank compute for one another."""
    from ascend_run.core.model import build

    def change(inner: Any) -> Any:
        def run(tokens: Any, counts: Any, probs: Any, weights: Any, activation: Any) -> Any:
            order = [1, 0, *range(2, len(counts))]
            changed = weights._replace(fc1=weights.fc1[order], fc2=weights.fc2[order])
            return inner(tokens, counts, probs, changed, activation)

        return run

    return replace(build, "loop_experts", change)


def freeze_nothing() -> Undo:
    """The base of an adapted model trains along."""
    from ascend_run.plugins.fine_tuning.lora import freezing

    return replace(freezing, "freeze", lambda inner: lambda model: None)


def freeze_adapters_too() -> Undo:
    """Of the first layer's attention."""
    from ascend_run.plugins.fine_tuning.lora import freezing

    def change(inner: Any) -> Any:
        def freeze(model: Any, *modules: Any) -> None:
            inner(model, *modules)
            for name, parameter in model.named_parameters():
                if "layers.0.self_attention" in name:
                    parameter.requires_grad_(False)

        return freeze

    return replace(freezing, "freeze", change)


def leave_one_parameter_out() -> Undo:
    """The last norm is in no group of the optimizer."""
    from ascend_run.core.train import optimizer

    def change(inner: Any) -> Any:
        def groups(chunks: Any, *arguments: Any) -> Any:
            left_out = {id(chunk.module.decoder.final_layernorm.weight) for chunk in chunks}
            return [
                {**group, "params": [p for p in group["params"] if id(p) not in left_out]}
                for group in inner(chunks, *arguments)
            ]

        return groups

    return replace(optimizer, "parameter_groups", change)


def halve_half_gradients() -> Undo:
    """Where the model is in half precision."""
    from ascend_run.core.train import step

    def change(inner: Any) -> Any:
        def finalize(model: Any, *args: Any, **kwargs: Any) -> None:
            inner(model, *args, **kwargs)
            for chunk in model:
                if next(chunk.parameters()).dtype is torch.bfloat16:
                    chunk.scale_gradients(0.5)

        return finalize

    return replace(step, "finalize_model_grads", change)


def forget_the_copies_of_weights() -> Undo:
    """The float32 copies are stepped, and the model keeps what it had."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    name = "_copy_main_params_to_model_params"
    return replace(Float16OptimizerWithFloat16Params, name, lambda inner: lambda self: None)


def start_the_data_over() -> Undo:
    """A resumed run reads from the first sample."""
    from ascend_run.core.train.batches import BatchReader

    def change(inner: Any) -> Any:
        return lambda self, dataset, consumed, *more: inner(self, dataset, 0, *more)

    return replace(BatchReader, "__call__", change)


def skip_a_batch() -> Undo:
    """A resumed run leaves a global batch of four samples out."""
    from ascend_run.core.train.batches import BatchReader

    def change(inner: Any) -> Any:
        def read(self: Any, dataset: Any, consumed: int, *more: Any) -> Any:
            return inner(self, dataset, consumed + (4 if consumed else 0), *more)

        return read

    return replace(BatchReader, "__call__", change)


def restore_what_rank_0_saved() -> Undo:
    """Tensors that each rank has of its own, such as states of generators."""
    from ascend_run.core.checkpoint.store import FileStore

    def change(inner: Any) -> Any:
        def load(self: Any, step: int, shards: Any, **how: Any) -> Any:
            of_0 = [
                attrs.evolve(shard, key=re.sub(r"/rank_\d+/", "/rank_00000/", shard.key))
                for shard in shards
            ]
            return inner(self, step, of_0, ignore_unused=("*",))

        return load

    return replace(FileStore, "load", change)


def forget_the_second_moments() -> Undo:
    """They are restored as zeros."""
    from ascend_run.core.checkpoint.store import FileStore

    def change(inner: Any) -> Any:
        def load(self: Any, step: int, shards: Any, **how: Any) -> Any:
            values = inner(self, step, shards, **how)
            for shard in shards:
                if shard.key.startswith("optimizer/exp_avg_sq/"):
                    shard.tensor.zero_()
            return values

        return load

    return replace(FileStore, "load", change)


def drop_alike_on_tensor_parallel_ranks() -> Undo:
    """The seed of attention dropout is the one that all of these ranks draw."""
    return _change_seeds(lambda layer, drawn: drawn)


def drop_alike_in_all_micro_batches() -> Undo:
    """The seed of attention dropout depends on the rank only."""
    return _change_seeds(lambda layer, drawn: layer.tp_group.rank())


def _change_seeds(seed_of: Callable[[Any, int], int]) -> Undo:
    from ascend_run.core.model.attention import CoreAttention

    def change(inner: Any) -> Any:
        def dropout(self: Any) -> Any:
            state = torch.get_rng_state()
            found = inner(self)
            torch.set_rng_state(state)
            return attrs.evolve(found, seed=seed_of(self, int(torch.randint(2**62, ()))))

        return dropout

    return replace(CoreAttention, "_dropout", change)


def drop_what_should_be_kept() -> Undo:
    from ascend_run.core.model.attention import CoreAttention

    def change(inner: Any) -> Any:
        return lambda self: attrs.evolve(inner(self), probability=1.0 - inner(self).probability)

    return replace(CoreAttention, "_dropout", change)


def drop_alike_in_shards_of_the_sequence() -> Undo:
    """Hidden dropout is drawn from the generator that tensor-parallel ranks share."""
    from megatron.core import tensor_parallel

    shared = SimpleNamespace(fork=nullcontext)
    return replace(tensor_parallel, "get_cuda_rng_tracker", lambda inner: lambda: shared)


def drop_differently_in_replicas() -> Undo:
    """Hidden dropout is drawn from the generator that tensor-parallel ranks do not share."""
    from megatron.core.fusions import fused_bias_dropout
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def change(inner: Any) -> Any:
        def add(*args: Any) -> Any:
            with get_cuda_rng_tracker().fork():
                return inner(*args)

        return add

    return replace(fused_bias_dropout, "_bias_dropout_add_func", change)


def drop_alike_on_context_parallel_ranks() -> Undo:
    """Ulysses keeps the seed that all ranks draw for the heads of each."""
    from ascend_run.ops.attention.context_parallel.head_all_to_all import HeadAllToAll

    def change(inner: Any) -> Any:
        def inner_spec(self: Any, spec: Any, share: Any) -> Any:
            return attrs.evolve(inner(self, spec, share), dropout=spec.dropout)

        return inner_spec

    return replace(HeadAllToAll, "_inner_spec", change)


def recompute_with_another_mask() -> Undo:
    from ascend_run.ops.attention import blockwise_attention

    def change(inner: Any) -> Any:
        def backward(*args: Any) -> Any:
            *tensors, spec = args
            other = attrs.evolve(spec.dropout, seed=spec.dropout.seed + 1)
            return inner(*tensors, attrs.evolve(spec, dropout=other))

        return backward

    return replace(blockwise_attention, "backward", change)


def forget_the_offset_of_saved_tensors() -> Undo:
    """A swapped tensor comes back from the start of its storage."""
    from ascend_run.ops.swapping.call import Call

    def change(inner: Any) -> Any:
        def unpack(kept: Any) -> Any:
            return inner(kept if isinstance(kept, torch.Tensor) else attrs.evolve(kept, offset=0))

        return staticmethod(unpack)

    return replace(Call, "unpack", change)


def clip_beyond_half_only() -> Undo:
    """Gradients of up to twice the largest norm are left as they are."""
    from ascend_run.core.train import optimizer

    def change(inner: Any) -> Any:
        def clip(part: Any, norm: float) -> None:
            if norm > 2.0 * part.config.clip_grad:
                inner(part, norm)

        return clip

    return replace(optimizer, "_clip", change)


def forget_the_streams_of_parallel_ranks() -> Undo:
    """They are saved, but not restored."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    return replace(CudaRNGStatesTracker, "set_states", lambda inner: lambda self, states: None)
