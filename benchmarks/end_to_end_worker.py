"""Train one system for some steps in a fresh process; prints one JSON line.

Every system takes its own road: its model class, its loss, its optimizer. What is equal: weights,
data, threads, AdamW's constants, and the learning rate.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import llama36m as m

Step = Callable[[int], float]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=m.LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )


def plain_step(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> Step:
    optimizer = adamw(model.parameters())

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(index)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def litgpt(dtype: torch.dtype, *, compiled: bool = False) -> Step:
    from litgpt import GPT, Config

    config = Config(
        name="llama-36m", block_size=m.SEQ_LENGTH, vocab_size=m.VOCAB, padded_vocab_size=m.VOCAB,
        n_layer=m.LAYERS, n_head=m.HEADS, n_embd=m.HIDDEN, intermediate_size=m.FFN,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", norm_eps=1e-5,
    )  # fmt: skip
    model = GPT(config)
    model.load_state_dict(m.litgpt_weights(), strict=False)
    model.to(dtype)
    model.max_seq_length = m.SEQ_LENGTH
    call: Any = torch.compile(model) if compiled else model

    def loss_of(index: int) -> torch.Tensor:
        tokens, labels = m.batch(index)
        return F.cross_entropy(call(tokens).flatten(0, 1).float(), labels.flatten())

    return plain_step(model, loss_of)


def megatron_local(dtype: torch.dtype) -> Step:
    """Megatron's own local layer spec behind the smallest facade that runs it on a CPU."""
    from benchmarks.minimal_facade import single_rank_megatron

    with single_rank_megatron():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=m.LAYERS, hidden_size=m.HIDDEN, num_attention_heads=m.HEADS,
        ffn_hidden_size=m.FFN, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-5, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, params_dtype=dtype,
        bias_activation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=m.VOCAB,
        max_sequence_length=m.SEQ_LENGTH, position_embedding_type="rope",
    )  # fmt: skip
    model.load_state_dict(m.weights(), strict=False)
    model.to(dtype)
    mask = torch.ones(1, 1, m.SEQ_LENGTH, m.SEQ_LENGTH).tril() < 0.5
    positions = torch.arange(m.SEQ_LENGTH).expand(m.MICRO_BATCH, -1)

    def loss_of(index: int) -> torch.Tensor:
        tokens, labels = m.batch(index)
        return model(tokens, positions, mask, labels=labels).mean()

    return plain_step(model, loss_of)


def ascend_run(dtype: torch.dtype, *enable: str) -> Step:
    """The whole step of a run: float32 master weights, clipping, schedule."""
    from benchmarks.our_run import train_step

    precision = next(name for name, value in m.DTYPES.items() if value is dtype)
    return train_step(precision, enable)


SYSTEMS: dict[str, Callable[[torch.dtype], Step]] = {
    "ascend-run": ascend_run,
    "ascend-run-compiled": lambda dtype: ascend_run(dtype, "compile"),
    "megatron-local": megatron_local,
    "litgpt": litgpt,
    "litgpt-compiled": lambda dtype: litgpt(dtype, compiled=True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--dtype", choices=m.DTYPES, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    step = SYSTEMS[options.system](m.DTYPES[options.dtype])
    losses = [step(index) for index in range(options.warmup)]
    seconds = []
    for index in range(options.warmup, options.warmup + options.steps):
        begin = time.perf_counter()
        losses.append(step(index))
        seconds.append(time.perf_counter() - begin)
    tokens = m.MICRO_BATCH * m.SEQ_LENGTH
    print(
        json.dumps(
            {
                "tokens_per_second": tokens / statistics.median(seconds),
                "losses": losses,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
