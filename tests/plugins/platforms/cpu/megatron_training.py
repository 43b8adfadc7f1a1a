"""Megatron's own model, data parallelism, optimizer and schedule on gloo ranks, without ascend-run.

Weights are a function of their name and of their position in the full model, so that every layout
of ranks trains the same model and its losses can be compared.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.overrides import _len_torch_function_stack

NUM_EXPERTS = 4
VOCABULARY = 64
SEQUENCE = 16
NUM_SAMPLES = 4


@attrs.frozen(kw_only=True)
class Case:
    """A layout of ranks and the model it trains."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: bool = False
    distributed_optimizer: bool = False
    precision: str = "fp32"
    average_in_collective: bool = False
    steps: int = 3


@attrs.frozen
class Outcome:
    """Results that must not depend on the layout."""

    losses: tuple[float, ...]
    """Mean over the global batch, before each step."""
    gradient_norms: tuple[float, ...]
    modes_in_forward: int
    """Number of TorchFunctionModes active inside a layer."""


def train(case: Case) -> Outcome:
    """Train ``case.steps`` steps on the current process group's ranks."""
    with megatron_on_the_cpu():
        return _train(case)


@contextmanager
def megatron_on_the_cpu() -> Iterator[None]:
    """Activate the facade, and destroy Megatron's groups afterwards."""
    from tests.support.cpu_facade import cpu_facade

    with cpu_facade():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron's and torch's own deprecations
                yield
        finally:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()


def _train(case: Case) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parallel_state.initialize_model_parallel(
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(7)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    moe = {
        "num_moe_experts": NUM_EXPERTS,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
    }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        pipeline_dtype=dtype,
        bf16=case.precision == "bf16",
        params_dtype=dtype,
        **(moe if case.experts else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=NUM_EXPERTS if case.experts else None),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    _fill_weights(model, case)
    wrapped = Float16Module(config, model) if case.precision == "bf16" else model
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer,
        average_in_collective=case.average_in_collective,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(config, ddp_config, wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=case.precision == "bf16",
            params_dtype=dtype,
            use_distributed_optimizer=case.distributed_optimizer,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss

    dp = parallel_state.get_data_parallel_world_size()
    dp_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, SEQUENCE + 1), generator=generator)
    mine = tokens[dp_rank::dp]
    losses, norms, modes = [], [], []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *_: modes.append(_len_torch_function_stack()))
    for _ in range(case.steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(mine.unbind(0)),
            model=[ddp],
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        total = torch.stack(reduced).sum() if reduced else torch.zeros(())
        dist.all_reduce(total)
        losses.append(total.item() / (NUM_SAMPLES * case.tp))
        norms.append(float(norm))
    return Outcome(tuple(losses), tuple(norms), max(modes))


def _forward_step(batches: Any, model: Any) -> Any:
    sample = next(batches).unsqueeze(0)
    tokens, labels = sample[:, :-1], sample[:, 1:]
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    out = model(tokens, positions, mask, labels=labels)
    return out, lambda loss: (loss.float().mean(), loss.float().mean().detach())


def _fill_weights(model: Any, case: Case) -> None:
    """Fill every weight from its name in the full model, sharded for this rank."""
    from megatron.core import parallel_state

    offset_layers = parallel_state.get_pipeline_model_parallel_rank() * (2 // case.pp)
    first_expert = parallel_state.get_expert_model_parallel_rank() * (NUM_EXPERTS // case.ep)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + offset_layers)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + first_expert)
        cut = getattr(parameter, "partition_dim", -1)
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        if "local_experts" in parts:
            size = parallel_state.get_expert_tensor_parallel_world_size()
            rank = parallel_state.get_expert_tensor_parallel_rank()
        shape = list(parameter.shape)
        if cut >= 0 and getattr(parameter, "tensor_model_parallel", False):
            shape[cut] *= size
        seed = int.from_bytes(hashlib.sha256(".".join(parts).encode()).digest()[:4], "big")
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        if len(shape) == 1 and "norm" in name:
            whole += 1.0
        if shape != list(parameter.shape):
            whole = whole.chunk(size, dim=cut)[rank]
        parameter.data.copy_(whole)


def gradient_of_two_instances() -> torch.Tensor:
    """Return the gradient of a linear on two data-parallel ranks, each a distributed optimizer
    instance of its own, reduced in Megatron's overlap. Builds groups by hand: Megatron's need
    einops."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from tests.support.cpu_facade import cpu_facade

    with cpu_facade():
        both = dist.new_group([0, 1])
        mine = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        alone = dict.fromkeys(("tp", "pp", "ep", "cp", "intra_dp_cp", "intra_expt_dp"), mine)
        shared = dict.fromkeys(("dp", "dp_cp", "expt_dp", "inter_dist_opt"), both)
        linear = torch.nn.Linear(4, 1, bias=False)
        ddp = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                num_distributed_optimizer_instances=2,
            ),
            linear,
            pg_collection=ProcessGroupCollection(**alone, **shared),
        )
        ddp.zero_grad_buffer()
        ddp(torch.arange(4.0) + 10 * dist.get_rank()).sum().backward()
        ddp.finish_grad_sync()
        return linear.weight.main_grad.detach().clone()


def backends_of_nccl(store: str) -> tuple[str, str]:
    """Return the backends of a world and of a group that are requested as Megatron does on GPUs."""
    from tests.support.cpu_facade import cpu_facade

    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with cpu_facade():
        try:
            dist.init_process_group(
                "nccl",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                device_id=torch.device("cuda", rank),
            )
            group = dist.new_group([0, 1], backend="nccl", pg_options=object())
            return dist.get_backend(), dist.get_backend(group)
        finally:
            dist.destroy_process_group()
