"""Fine-tune an adapter by trl and peft for some steps in a fresh process; prints one JSON line.

A step is all records of the file, so that it is the same work however they are grouped.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from . import llama
from .tuning_data import ALPHA, MICRO_BATCH, RANK, TARGETS, answers

OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    # What is packed becomes one sequence with a mask of its documents: more than one sample at a
    # time would be a mask of as many times as many positions, squared.
    "packed": {"packing": True, "packing_strategy": "bfd", "per_device_train_batch_size": 1},
    "padded": {"per_device_train_batch_size": MICRO_BATCH},
}
METRICS: Final = ("loss", "grad_norm", "logps/chosen", "logps/rejected")


def trainer_of(task: str, grouping: str, folder: Path, options: Mapping[str, Any]) -> Any:
    """Return trl's trainer of a task.

    Args:
        grouping: Key of ``OPTIONS``.
        options: Of the trainer's config, beside those.
    """
    from datasets import Dataset
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    base, bf16 = folder / "model", options["bf16"]
    length = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    lines = (folder / f"{task}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records.sort(key=lambda record: max(size_of(messages) for messages in answers(record)))
    made, config, more = {
        "sft": (SFTTrainer, SFTConfig, {"assistant_only_loss": True}),
        "dpo": (DPOTrainer, DPOConfig, {"beta": 0.1}),
    }[task]
    rows = records if task == "sft" else [texts(tokenizer, record) for record in records]
    trainer: Any = made(
        model=LlamaForCausalLM.from_pretrained(
            base, dtype=torch.bfloat16 if bf16 else torch.float32, attn_implementation="sdpa"
        ),
        args=config(
            gradient_accumulation_steps=len(records),  # at most: a step is an epoch
            max_length=length if grouping == "packed" else None,
            **{**more, **OPTIONS[grouping], **options},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=[*TARGETS], task_type="CAUSAL_LM"
        ),
    )
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    found = set_peft_model_state_dict(trainer.model, adapter)
    assert not found.unexpected_keys
    return trainer


def size_of(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def texts(tokenizer: Any, record: Mapping[str, Any]) -> dict[str, str]:
    """Return a pair with its prompt rendered; trl adds what closes an answer."""
    question = [{"role": "user", "content": record["conversations"][0]["value"]}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    sides = {side: record[side]["value"] for side in ("chosen", "rejected")}
    return {"prompt": prompt, **sides}


def common_options(output: Path, steps: int, *, bf16: bool) -> dict[str, Any]:
    """Return the options of both trainers; the optimizer's are those of our run."""
    return {
        "output_dir": str(output),
        "num_train_epochs": steps,
        "train_sampling_strategy": "sequential",
        "learning_rate": llama.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": bf16,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def timer(trainer: Any) -> list[float]:
    """Let a trainer append the seconds of every step, which is an epoch: reading, forward,
    backward and update."""
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Timer(TrainerCallback):  # type: ignore[misc]  # of a library without types
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)

    trainer.add_callback(Timer())
    return seconds


def measure(trainer: Any) -> dict[str, Any]:
    seconds = timer(trainer)
    trainer.train()
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert len(history) == len(seconds)
    return {
        "seconds": seconds,
        **{name: [line[name] for line in history if name in line] for name in METRICS},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--task", choices=("sft", "dpo"), required=True)
    parser.add_argument("--grouping", choices=OPTIONS, required=True)
    parser.add_argument("--dtype", choices=llama.DTYPES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(arguments)
    common = common_options(options.output, options.steps, bf16=options.dtype == "bf16")
    trainer = trainer_of(options.task, options.grouping, options.folder, common)
    print(json.dumps(measure(trainer)))


if __name__ == "__main__":
    main()
