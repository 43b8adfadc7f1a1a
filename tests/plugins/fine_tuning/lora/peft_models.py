"""Adapters saved by PEFT for a tiny Llama saved by transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import LlamaForCausalLM

RANK, ALPHA = 4, 6

EVERY: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_model(base: str | Path, *, targets: Any = EVERY, seed: int = 3, **options: Any) -> Any:
    """Build a model with random A and B: every projection has its own adapter."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            LlamaForCausalLM.from_pretrained(base),
            LoraConfig(
                **{
                    "r": RANK,
                    "lora_alpha": ALPHA,
                    "target_modules": [*targets],
                    "task_type": "CAUSAL_LM",
                    **options,
                }
            ),
        )
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.normal_(0.0, 0.1)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return PEFT's own parameters, by the names in its files."""
    return {
        name.replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def write_peft(model: Any, folder: Path) -> str:
    """Save the model with PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return str(folder)


def read_peft(base: str | Path, folder: str | Path) -> Any:
    """Load the model with PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(
            LlamaForCausalLM.from_pretrained(base), folder, is_trainable=True
        )
