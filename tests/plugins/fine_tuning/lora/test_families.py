"""Adapters of PEFT in the families whose modules' names are known, against PEFT on transformers'
models, and these names against the families' own tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ascend_run.core.hugging_face.parameter_rows import parameter_sources
from ascend_run.plugins.fine_tuning.lora.peft_names import PEFT_NAMES
from ascend_run.plugins.fine_tuning.lora.saved_modules import PEFT_MODULES
from ascend_run.plugins.fine_tuning.lora.targets import LINEARS
from ascend_run.testing.hugging_face.variants import sizes
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.convert.model_config import load_family
from tests.support.loaded_model import largest_difference
from tests.support.tiny_families import FAMILIES, tiny_run

from .lora_jobs import base_values, hf_names, run_once
from .peft_models import every_linear_is_one, peft_model, trained, write_peft
from .test_against_peft import TOLERANCE

HEADS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
SHARED: Final = tuple(f"mlp.shared_expert.{name}" for name in MLP)
EXPERTS: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ALL: Final = ("all-linear",)
CASES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]] = {
    **dict.fromkeys(
        ("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite"),
        ((*HEADS, *MLP), (), ALL),
    ),
    "qwen2_moe": ((*HEADS, *SHARED), EXPERTS, ("all-linear", "experts")),
    "qwen3_moe": (HEADS, EXPERTS, ("all-linear", "experts")),
    **dict.fromkeys(
        ("glm", "glm4"),
        ((*HEADS, "down_proj"), (), ("linear_qkv", "linear_proj", "linear_fc2")),
    ),
    "phi3": (("o_proj", "down_proj"), (), ("linear_proj", "linear_fc2")),
}
"""Family -> modules and parameters that PEFT adapts, and ours. Llama, Mixtral and those with
latents have suites of their own; transformers has no classes of the rest."""
OTHER_NAMES: Final = frozenset({"bloom", "chatglm", "gpt", "gpt2", "grok1", "internlm2", "qwen"})
FUSED_HEADS: Final = frozenset({"baichuan", "baichuan2", "baichuan2_13b", "baichuan_13b"})
OTHER_EXPERTS: Final = frozenset({"gpt_oss", "minicpm_moe", "phimoe"})
"""Whose experts PEFT would adapt in another form."""


def write_model(folder: Path, name: str) -> str:
    """Write a random model as a Hugging Face folder."""
    family = load_family(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **sizes(family))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.exhaustive(by=lambda family: [family in ("qwen2_moe", "gemma2", "glm4")])
@pytest.mark.parametrize("family", CASES)
def test_an_adapter_of_peft_computes_and_trains_as_in_peft(
    gloo_pool: GlooPool, tmp_path: Path, family: str
) -> None:
    modules, parameters, ours = CASES[family]
    base = write_model(tmp_path / "base", family)
    with every_linear_is_one():
        model = peft_model(base, targets=modules, target_parameters=[*parameters] or None)
    adapter = write_peft(model, tmp_path / "adapter")
    drawn = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    values = {
        **base_values(base, adapter, model__family=family),
        "plugins.lora.target_modules": [*ours],
        "model.moe_aux_loss_coeff": 0.0,
    }
    if not parameters:
        del values["model.moe_aux_loss_coeff"]
    (outcome,) = gloo_pool.run(run_once, 1, values, tokens, labels, merges=False)
    assert largest_difference(outcome.logits_BSV, logits.detach()) < TOLERANCE
    with torch.no_grad(), model.disable_adapter():
        assert largest_difference(model(input_ids=tokens).logits, logits.detach()) > 0.001
    expected: Mapping[str, Tensor | None] = {n: p.grad for n, p in trained(model).items()}
    gradients: dict[str, Any] = {
        name.replace("shared_experts", "shared_expert"): gradient
        for name, gradient in hf_names(outcome.gradients).items()
    }
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < TOLERANCE, name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in PEFT_NAMES])
def test_names_are_those_of_the_familys_own_table(family: str) -> None:
    config = tiny_run(family).config
    sources = parameter_sources(load_family(family), config)
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        inner = name.removeprefix("decoder.layers.").partition(".")[2].removesuffix(".weight")
        if inner in LINEARS:
            theirs = [hf.split(".", 3)[3].removesuffix(".weight") for hf in source.hf_names]
            parts = LINEARS[inner]
            if len(theirs) == len(parts):
                for part, module in zip(parts, theirs, strict=True):
                    found.setdefault(part, set()).add(module)
    known = {part: {PEFT_NAMES[family][part]} for part in found}
    assert found == known
    # A family's other options have the others: plain queries of latents, dense layers.
    others = PEFT_NAMES[family].keys() - found.keys()
    assert others <= {"linear_q_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in PEFT_NAMES])
def test_modules_trained_in_full_have_the_names_of_the_table(family: str) -> None:
    sources = parameter_sources(load_family(family), tiny_run(family).config)
    places = {
        "word_embeddings": "embedding.word_embeddings",
        "final_layernorm": "decoder.final_layernorm",
        "output_layer": "output_layer",
        **{n: f"decoder.layers.1.{n}" for n in ("input_layernorm", "pre_mlp_layernorm")},
        "router": "decoder.layers.1.mlp.router",
    }
    for module, theirs in PEFT_MODULES[family].items():
        source = sources.get(f"{places.get(module)}.weight")
        if source is not None:
            (name,) = source.hf_names
            found = name.removeprefix("model.layers.1.").removesuffix(".weight")
            # Mixtral's files have an older name of the module than transformers' model.
            assert found.replace("block_sparse_moe", "mlp") == theirs


def test_families_without_names_are_those_that_name_other_modules() -> None:
    assert {*FAMILIES} - {*PEFT_NAMES} == OTHER_NAMES | FUSED_HEADS | OTHER_EXPERTS
    assert {*PEFT_NAMES} <= {*FAMILIES}
    assert PEFT_MODULES.keys() == PEFT_NAMES.keys()
