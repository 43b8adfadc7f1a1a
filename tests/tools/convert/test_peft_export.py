"""Adapters of a run written in PEFT's format, loaded by PEFT beside transformers' model.

The checkpoints are written here, from matrices by Hugging Face's names.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from ascend_run.core.checkpoint import FileStore
from ascend_run.ops.weight_sources import weights_digest
from ascend_run.plugin_api.contracts import TensorShard

from .megatron_files import hugging_face
from .test_mp_rank import check_equal, convert

RANK, ALPHA, HIDDEN, FFN, QUERIES, KEYS = 3, 5, 32, 48, 32, 16
LLAMA_LIKE: Final[dict[str, Any]] = {
    "vocab_size": 61,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
CONFIGS: Final[dict[str, PretrainedConfig]] = {
    "qwen2": Qwen2Config(**LLAMA_LIKE),
    "qwen3_moe": Qwen3MoeConfig(
        **LLAMA_LIKE,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    ),
    "gpt2": GPT2Config(vocab_size=61, n_embd=HIDDEN, n_layer=2, n_head=4, n_inner=FFN),
    "phi3": Phi3Config(**LLAMA_LIKE),
}
ATTENTION: Final = {
    "linear_qkv": {
        "linear_q": ("self_attn.q_proj", QUERIES),
        "linear_k": ("self_attn.k_proj", KEYS),
        "linear_v": ("self_attn.v_proj", KEYS),
    },
    "linear_proj": {"linear_proj": ("self_attn.o_proj", HIDDEN)},
}
FEED_FORWARD: Final = {
    "linear_fc1": {
        "linear_fc1_gate": ("mlp.gate_proj", FFN),
        "linear_fc1_up": ("mlp.up_proj", FFN),
    },
    "linear_fc2": {"linear_fc2": ("mlp.down_proj", HIDDEN)},
}
OF_GPT2: Final = {"linear_fc2": {"linear_fc2": ("mlp.c_proj", HIDDEN)}}


def write_run(folder: Path, family: str, *, rslora: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """Write a base and a run with random adapters of it; return the run and PEFT's matrices."""
    base, run = folder / "base", folder / "run"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(base)
    assert convert("--to", "ascend-run", base, run) == 0
    linears: dict[str, Any] = {**ATTENTION, **FEED_FORWARD}
    if family == "qwen3_moe":  # experts take no adapter
        linears = ATTENTION
    elif family == "gpt2":
        linears = OF_GPT2
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    prefix = "transformer.h" if family == "gpt2" else "model.layers"
    for layer in range(2):
        for linear, parts in linears.items():
            inside = "self_attention" if linear in ATTENTION else "mlp"
            at = f"model/decoder.layers.{layer}.{inside}.{linear}.adapter.lora_"
            columns = FFN if linear == "linear_fc2" else HIDDEN
            ours[f"{at}A"] = torch.randn(RANK * len(parts), columns)
            for index, (part, (module, rows)) in enumerate(parts.items()):
                ours[f"{at}B.{part}"] = torch.randn(rows, RANK)
                name = f"base_model.model.{prefix}.{layer}.{module}.lora_"
                theirs[f"{name}A.weight"] = ours[f"{at}A"][RANK * index :][:RANK]
                theirs[f"{name}B.weight"] = ours[f"{at}B.{part}"]
    shards = [
        TensorShard(key=key, tensor=one, global_shape=tuple(one.shape), offset=(0,) * one.ndim)
        for key, one in ours.items()
    ]
    record = {"alpha": float(ALPHA), "rslora": rslora, "base": weights_digest(base)}
    FileStore(run / "checkpoints").save(7, shards, {"lora": record})
    return run, theirs


def loaded_by_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (
            "qwen2",
            ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        ),
        ("qwen3_moe", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        # attention has a projection of the same name
        ("gpt2", ["mlp.c_proj"]),
    ],
)
def test_peft_loads_the_adapters_of_a_run(family: str, targets: list[str], tmp_path: Path) -> None:
    """Bit for bit; and PEFT's merged weights are those of --to hf and of --adapter."""
    run, matrices = write_run(tmp_path, family, rslora=family == "qwen2")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    words = ("--to", "peft", "--base", base, "--verify", "tensors", run, adapter)
    assert convert(*words) == 0
    check_equal(load_file(adapter / "adapter_model.safetensors"), matrices)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["target_modules"] == targets
    assert settings["base_model_name_or_path"] == str(base)

    model = loaded_by_peft(base, adapter)
    found = {n.replace(".default", ""): t for n, t in model.named_parameters() if "lora_" in n}
    check_equal(found, matrices)
    assert convert("--to", "hf", "--adapter", adapter, base, tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    by_peft = model.merge_and_unload().state_dict()
    changed = 0
    for name, before in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        torch.testing.assert_close(merged[name], by_peft[name], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(merged[name], before)
    assert changed == len(matrices) // 2


def test_adapters_without_a_form_in_peft_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phi-3 stores queries, keys and values as one linear, and gate and up."""
    run, _ = write_run(tmp_path, "phi3")
    out = tmp_path / "new" / "out"
    assert convert("--to", "peft", run, out) == 2
    message = capsys.readouterr().err
    assert "linear_q, linear_k, linear_v of decoder.layers.1.self_attention.linear_qkv" in message
    assert "not a linear layer of its own in model.layers.1.self_attn.qkv_proj" in message
    assert "linear_fc1_gate, linear_fc1_up of decoder.layers.0.mlp.linear_fc1" in message
    assert "linear_proj of" not in message
    assert convert("--to", "peft", "--step", "0", run, out) == 2
    assert "has no adapters; only a run with lora has any" in capsys.readouterr().err
    hugging_face(tmp_path / "hf")
    assert convert("--to", "peft", tmp_path / "hf", out) == 2
    assert "is of format hf; --to peft writes the adapters of a run" in capsys.readouterr().err
    assert convert("--to", "peft", "--adapter", tmp_path / "a", "--tp", "2", run, out) == 2
    assert "--tp: no effect with --to peft" in capsys.readouterr().err
    assert convert("--to", "peft", "--adapter", tmp_path / "a", run, out) == 2
    assert "--adapter: no effect with --to peft" in capsys.readouterr().err
    assert convert("--to", "peft", "--verify", "logits", run, out) == 2
    assert "with --to peft say --verify tensors" in capsys.readouterr().err
    assert not out.parent.exists()
