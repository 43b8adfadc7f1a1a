"""Adapters saved by PEFT for a tiny model saved by transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from ascend_run.testing.hugging_face.widened import computing_in

RANK, ALPHA, VOCAB = 4, 6, 61

EVERY: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


LATENT: Final = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""Of latent attention. PEFT takes the MLPs of a DeepSeek for experts, whatever their names."""
EXPERTS: Final = {
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}


def write_latent(folder: Path, family: str, **changes: Any) -> str:
    """Write a random model with latent attention as a Hugging Face folder: a MiniCPM3, or a
    DeepSeek with a dense layer and one with experts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            **({} if family == "minicpm3" else {"v_head_dim": 12, **EXPERTS}),
            **changes,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def write_mixtral(folder: Path, **changes: Any) -> str:
    """Write a random Mixtral with four experts, two per token, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral",
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
            **changes,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def base_model(folder: str | Path, num_labels: int | None = None) -> Any:
    """Load a model that predicts tokens, or with a score head of so many labels."""
    if num_labels is None:
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels)


def peft_model(
    base: str | Path,
    *,
    targets: Any = EVERY,
    seed: int = 3,
    num_labels: int | None = None,
    **options: Any,
) -> Any:
    """Build a model with random A and B: every projection has its own adapter."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            base_model(base, num_labels),
            LoraConfig(
                **{
                    "r": RANK,
                    "lora_alpha": ALPHA,
                    "target_modules": [*targets],
                    "task_type": "SEQ_CLS" if num_labels else "CAUSAL_LM",
                    **options,
                }
            ),
        )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
            else:
                parameter.mul_(1.0 + 0.1 * torch.rand_like(parameter))
    return model


@contextmanager
def every_linear_is_one() -> Iterator[None]:
    """Let PEFT adapt the linears that are named. PEFT 0.21 takes ``gate_proj`` and the like of a
    model with routed experts for theirs, as in files of transformers 4, those of shared experts
    and of dense layers too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformers_weight_conversion, "_convert_peft_config_moe", lambda *_: None)
        yield


def in_float64(model: Any) -> Any:
    """Return PEFT's model with its weights, and the angles of its positions, in float64."""
    decoder = model.eval().double().get_base_model().model
    with computing_in(torch.float64):
        decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return PEFT's own parameters, by the names in its files."""
    return {
        name.replace(".modules_to_save", "").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name or ".modules_to_save." in name
    }


def random_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, both [2, 16] int64."""
    rows = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def logits_of(model: Any) -> Tensor:
    """Return the logits of a model of transformers or PEFT on fixed tokens, [2, 24, V]."""
    tokens = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens).logits
    return logits


def write_peft(model: Any, folder: Path) -> str:
    """Save the model with PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return str(folder)


def read_peft(base: str | Path, folder: str | Path, num_labels: int | None = None) -> Any:
    """Load the model with PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base_model(base, num_labels), folder, is_trainable=True)
