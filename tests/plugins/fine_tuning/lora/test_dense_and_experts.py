"""Adapters of a DeepSeek's dense layer beside those of its experts, as PEFT builds them.

The names of both end in ``down_proj``, and so do those of shared experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run, write_tokens
from tests.support.loaded_model import largest_difference

from .lora_jobs import base_values
from .peft_models import read_peft, trained, write_latent
from .test_convert import convert

VOCAB = 61
SIZES: dict[str, tuple[int, float]] = {
    "self_attn.q_a_proj": (4, 6.0),
    "self_attn.q_b_proj": (4, 6.0),
    "self_attn.kv_a_proj_with_mqa": (4, 6.0),
    "self_attn.kv_b_proj": (4, 6.0),
    "self_attn.o_proj": (2, 6.0),
    "mlp.gate_proj": (4, 9.0),
    "mlp.up_proj": (4, 6.0),
    "mlp.down_proj": (6, 32.0),
    "mlp.shared_experts.gate_proj": (4, 9.0),
    "mlp.shared_experts.up_proj": (4, 6.0),
    "mlp.shared_experts.down_proj": (6, 32.0),
    "mlp.experts.gate_up_proj": (4, 6.0),
    "mlp.experts.down_proj": (4, 6.0),
}
"""Module or stacked weight -> its rank and alpha in the run below."""
OPTIONS: dict[str, Any] = {
    "plugins.lora.target_modules": ["all-linear", "experts"],
    "plugins.lora.rank_pattern": {"linear_fc2": 6, "linear_proj": 2},
    "plugins.lora.alpha_pattern": {"linear_fc2": 32.0, "linear_fc1_gate": 9.0},
}


@pytest.fixture
def names_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PEFT take names as they are: it takes those of a dense MLP for experts of transformers 4,
    and can then read no adapter of one."""
    from peft.utils import transformers_weight_conversion as conversion

    monkeypatch.setattr(conversion, "_convert_peft_config_moe", lambda *_: None)


def sizes_of(model: Any) -> dict[str, tuple[int, float]]:
    """Return rank and alpha of every adapter that PEFT has built, by full names."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found = {}
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            full = name.replace(".base_layer", "")
            if isinstance(module, ParamWrapper):
                full += f".{module.parameter_name}"
            rank = module.r["default"]
            found[full] = (rank, round(module.scaling["default"] * rank, 9))
    return found


def logits_of(model: Any) -> Tensor:
    tokens = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens).logits
    return logits


@pytest.mark.usefixtures("names_of_now")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # of 0 shared
@pytest.mark.parametrize("shared", [2, 0])
def test_peft_builds_every_adapter_of_a_run_with_its_size(
    gloo_pool: GlooPool, tmp_path: Path, shared: int
) -> None:
    base = write_latent(tmp_path / "base", "deepseek_v2", n_shared_experts=shared)
    values = {
        **base_values(base, model__family="deepseek_v2", **OPTIONS),
        "run.output_dir": str(tmp_path / "run"),
        "data.train": [write_tokens(tmp_path / "tokens", VOCAB, 40, 1)],
        "train.train_iters": 3,
        "train.global_batch_size": 2,
        "optimizer.lr": 0.05,
        "checkpoint.save_interval": 3,
    }
    gloo_pool.run(whole_run, 1, values, ("lora",), timeout=100)
    assert convert("--to", "peft", tmp_path / "run", tmp_path / "written") == 0
    assert convert("--to", "hf", tmp_path / "run", tmp_path / "merged") == 0
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    own, written = tmp_path / "run/adapter", tmp_path / "written"
    settings = [json.loads((f / "adapter_config.json").read_text()) for f in (own, written)]
    assert settings[0] == settings[1]
    expected = {
        f"model.layers.{layer}.{name}": size
        for layer in (0, 1)
        for name, size in SIZES.items()
        if name.startswith("self_attn.") or (layer == 1) == ("experts." in name)
        if shared or "shared" not in name
    }
    for folder in (own, written):
        model = read_peft(base, folder)
        assert sizes_of(model) == expected
        stored, held = load_file(folder / "adapter_model.safetensors"), trained(model)
        assert held.keys() == stored.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
        assert largest_difference(logits_of(model), merged) < 1e-5
        with model.disable_adapter():
            assert largest_difference(logits_of(model), merged) > 0.01
        target = tmp_path / f"of {folder.name}"
        assert convert("--to", "hf", "--adapter", folder, base, target) == 0
        again = AutoModelForCausalLM.from_pretrained(target)
        assert largest_difference(logits_of(again), merged) < 1e-5
