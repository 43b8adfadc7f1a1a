"""Train an adapter beside a base in 4 bits in a fresh process; prints one JSON line.

Both systems read the same base, the same adapter and the same batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE: Final = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
SEQUENCE, BATCH, RANK = 256, 4, 8
RATE: Final = 1e-3
LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Step = Callable[[int], float]


def batch(index: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, [BATCH, SEQUENCE], the same for both systems."""
    generator = torch.Generator().manual_seed(index)
    shape = (BATCH, SEQUENCE + 1)
    tokens = torch.randint(int(SHAPE["vocab_size"]), shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def write(folder: Path) -> None:
    """Write the base in bf16, and an adapter with random A and B."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[*LINEARS])
    adapted = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    adapted.save_pretrained(folder / "adapter")


def ascend_run(folder: Path, stack: ExitStack) -> tuple[Step, Any]:
    """Return a step of a run with ``lora,qlora``, and the model."""
    from ascend_run.core.run import prepared_rank
    from ascend_run.core.train.seeding import seed_everything
    from ascend_run.plugin_api import Batch
    from ascend_run.prepare.prepare import prepare
    from ascend_run.testing.dry_run import DryRun

    values = [
        "model.family=llama",
        f"model.hf_path={folder / 'base'}",
        "data.train=never-read",  # batches are made here
        f"data.seq_length={SEQUENCE}",
        f"train.micro_batch_size={BATCH}",
        f"train.global_batch_size={BATCH}",
        "train.precision=bf16",
        f"optimizer.lr={RATE}",
        "optimizer.lr_decay_style=constant",
        "optimizer.weight_decay=0.0",
        "optimizer.clip_grad=0.0",
        f"plugins.lora.rank={RANK}",
        f"plugins.lora.alpha={2 * RANK}",
        f"plugins.lora.load={folder / 'adapter'}",
        "plugins.lora.export=false",
    ]
    prepared = prepare(None, values, enable=("lora", "qlora"), platform="cpu")
    hooks, context = stack.enter_context(prepared_rank(prepared.run_request()))
    seed_everything(prepared.config, context.layout)
    dry_run = DryRun(hooks, context)
    dry_run.build()
    dry_run.load_weights()
    train_step, fields = dry_run.train_step(), dry_run.task.batch_fields

    def step(index: int) -> float:
        tokens, labels = batch(index)
        tensors = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones(tokens.shape),
            "position_ids": torch.arange(SEQUENCE).expand_as(tokens),
        }
        return train_step(iter([Batch(tensors=tensors, fields=fields)]), 1).loss

    return step, dry_run.bundle.chunks[0]


def peft(folder: Path) -> Step:
    """Return a step of PEFT's model on bitsandbytes' linears, as its guide makes them."""
    import bitsandbytes
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    for layer in model.model.layers:
        for name, linear in [*layer.named_modules()]:
            if isinstance(linear, nn.Linear):
                quantised = bitsandbytes.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                )
                quantised.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data,
                    requires_grad=False,
                    compress_statistics=True,
                    quant_type="nf4",
                )
                layer.set_submodule(name, quantised.to("cpu"))
    model.is_loaded_in_4bit = True
    adapted: Any = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )

    def step(index: int) -> float:
        tokens, labels = batch(index)
        optimizer.zero_grad(set_to_none=True)
        logits = adapted(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def held(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the bytes of the quantised linears, and of the model without adapters."""
    from ascend_run.ops.linear.stored_weight import held_tensors, stored_weight

    base = [p for name, p in model.named_parameters() if ".adapter." not in name]
    linears = [parameter for parameter in base if stored_weight(parameter)]
    return {
        kind: {
            "held": nbytes(tensor for one in parameters for tensor in held_tensors(one)),
            "in_bf16": 2 * sum(one.numel() for one in parameters),
        }
        for kind, parameters in (("linears", linears), ("model", base))
    }


def measure(step: Step, warmup: int, steps: int) -> dict[str, Any]:
    """Return the losses of all steps, and the speed after the warm-up."""
    losses = [step(index) for index in range(warmup)]
    seconds = []
    for index in range(warmup, warmup + steps):
        begin = time.perf_counter()
        losses.append(step(index))
        seconds.append(time.perf_counter() - begin)
    return {"tokens_per_second": BATCH * SEQUENCE / statistics.median(seconds), "losses": losses}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "ascend-run", "peft"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        if options.what == "write":
            write(options.folder)
        elif options.what == "peft":
            result = measure(peft(options.folder), options.warmup, options.steps)
        else:
            step, model = ascend_run(options.folder, stack)
            result = measure(step, options.warmup, options.steps) | held(model)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
