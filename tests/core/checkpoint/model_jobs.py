"""Jobs for gloo ranks: a model and its optimizer, in any layout, into and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ascend_run.core.checkpoint import FileStore, GroupRanks
from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import FieldSection, RunContext, TensorShard
from ascend_run.prepare.config.loading import build_config, read_raw

VOCABULARY = 50


@attrs.frozen(kw_only=True)
class Case:
    """A layout of ranks and what is trained in it; the model does not depend on the layout."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    experts: int = 0
    tied: bool = False
    precision: str = "fp32"
    distributed_optimizer: bool = False
    seed: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def overrides(self) -> list[str]:
        moe = [
            f"model.num_moe_experts={self.experts}",
            "model.moe_router_topk=2",
            "model.moe_ffn_hidden_size=24",
        ]
        return [
            "model.num_layers=2",
            "model.hidden_size=32",
            "model.ffn_hidden_size=48",
            "model.num_attention_heads=4",
            "model.num_query_groups=2",
            "model.normalization=RMSNorm",
            "model.activation=silu",
            "model.gated_linear_unit=true",
            "model.add_bias_linear=false",
            f"model.vocab_size={VOCABULARY}",
            "model.make_vocab_size_divisible_by=8",
            f"model.share_embeddings_and_output_weights={str(self.tied).lower()}",
            f"parallel.tensor_model_parallel_size={self.tp}",
            f"parallel.expert_model_parallel_size={self.ep}",
            f"parallel.sequence_parallel={str(self.tp > 1 and self.experts > 0).lower()}",
            f"train.precision={self.precision}",
            f"run.seed={self.seed}",
            "optimizer.clip_grad=0",
            f"ddp.use_distributed_optimizer={str(self.distributed_optimizer).lower()}",
            *(moe if self.experts else []),
        ]


@contextmanager
def trained(case: Case, steps: int) -> Iterator[tuple[FileStore, Any, list[TensorShard]]]:
    """A model after some optimizer steps: a factory of stores, the optimizer, all shards.

    The gradients are a function of each parameter's own elements, so that the state after a step
    does not depend on the layout.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from ascend_run.core.checkpoint.optimizer_shards import optimizer_shards
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
    from ascend_run.core.model.build import build_model
    from ascend_run.core.patches import applied_patches
    from ascend_run.core.train.data_parallel import wrap_data_parallel
    from ascend_run.core.train.groups import process_groups
    from ascend_run.core.train.optimizer import build_optimizer
    from ascend_run.plugins.platforms.cpu import Cpu
    from ascend_run.plugins.platforms.cpu.options import CpuOptions

    hooks = Hooks([Cpu(CpuOptions())])
    config = build_config(read_raw(None, case.overrides()), {}, {}, ()).config
    # The loop refuses pipeline stages so far; a checkpoint must not know the difference.
    stages = {**config.parallel, "pipeline_model_parallel_size": case.pp}
    config = attrs.evolve(config, parallel=FieldSection(stages))
    layout = layout_of(config, dist.get_world_size(), dist.get_rank())
    device = hooks.require("ascend_device", local_rank=0)
    device.activate()
    try:
        with applied_patches(hooks), process_groups(config, layout, device, hooks, {}) as groups:
            model_parallel_cuda_manual_seed(case.seed)
            bundle = build_model(config, hooks, groups, device)
            wrap_data_parallel(bundle, config, hooks, groups, 1)
            context = RunContext(config=config, layout=layout, device=device, groups=groups)
            build_optimizer(bundle, hooks, context)
            for _ in range(steps):
                _step(bundle)
            tensors = sharded_tensors(bundle.chunks, vocab_size=VOCABULARY)
            shards = [*model_shards(tensors), *optimizer_shards(bundle.optimizer, tensors)]
            yield layout, bundle, shards
    finally:
        device.deactivate()


class ExactAdam(torch.optim.AdamW):
    """States and parameters of AdamW, moved by single additions and products only: the fused
    kernels round the last elements of a tensor otherwise than the first, so their results depend
    on how a tensor is cut."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].mul_(0.5).add_(parameter.grad)
                state["exp_avg_sq"].mul_(0.25).add_(parameter.grad.square())
                parameter.sub_(state["exp_avg"] * 0.0625)


def _step(bundle: Any) -> None:
    for part in getattr(bundle.optimizer, "chained_optimizers", [bundle.optimizer]):
        part.optimizer.__class__ = ExactAdam
    for chunk in bundle.chunks:
        for parameter in chunk.parameters():
            gradient = parameter.detach() * 0.5 + 0.125
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.copy_(gradient)
            else:
                parameter.grad = gradient
    bundle.optimizer.step()


def save(case: Case, folder: str, steps: int = 2) -> None:
    """Train some steps and save."""
    with trained(case, steps) as (layout, _, shards):
        FileStore(folder, layout=layout, ranks=GroupRanks()).save(1, shards, {"steps": steps})


def load_and_save(case: Case, folder: str, other: str) -> None:
    """Load into a model with other weights and another past, and save what it then is."""
    with trained(attrs.evolve(case, seed=case.seed + 1), 1) as (layout, _, shards):
        FileStore(folder, layout=layout, ranks=GroupRanks()).load(1, shards)
        FileStore(other, layout=layout, ranks=GroupRanks()).save(1, shards, {"steps": 2})


def continue_from(case: Case, folder: str, other: str) -> None:
    """Load into a fresh model, train one more step, save."""
    with trained(attrs.evolve(case, seed=case.seed + 1), 0) as (layout, bundle, shards):
        FileStore(folder, layout=layout, ranks=GroupRanks()).load(1, shards)
        _step(bundle)
        FileStore(other, layout=layout, ranks=GroupRanks()).save(1, shards, {"steps": 3})


def corrupt_and_choose(folder: str) -> str:
    """What the ranks say, one by one, of a checkpoint that only rank 1 finds corrupt."""
    from ascend_run.core.checkpoint import choose

    store = FileStore(folder, ranks=GroupRanks(), keep_last=0)
    rank = dist.get_rank()
    for step in (1, 2):
        shard = TensorShard(
            key="t", tensor=torch.full((4,), float(step)), global_shape=(8,), offset=(4 * rank,)
        )
        store.save(step, [shard], {})
    if rank == 1:
        with open(f"{folder}/step_00000002/rank_0001.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")
    dist.barrier()
    choice = choose(FileStore(folder, ranks=GroupRanks()))
    return f"{choice.step} {choice.corrupt[0].reason}"
