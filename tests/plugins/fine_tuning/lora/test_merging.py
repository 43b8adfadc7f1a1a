"""``convert --adapter`` on Hugging Face folders: what it refuses, and the files that go along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ascend_run.ops.linear.peft_base import metadata_of
from ascend_run.ops.weight_sources import weight_source, weights_digest
from tests.support.loaded_model import largest_difference
from tests.support.tiny_llama import write_llama

from .merged_models import convert, merged_by_peft_exactly
from .peft_models import (
    LATENT,
    peft_model,
    random_batch,
    write_latent,
    write_mixtral,
    write_peft,
)

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def merged(base: str | Path, adapter: str | Path, target: Path) -> int:
    return convert("--to", "hf", "--adapter", adapter, base, target)


def test_an_unmergeable_adapter_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    small = write_llama(tmp_path / "small", 61, num_hidden_layers=1)
    narrow = write_llama(tmp_path / "narrow", 61, intermediate_size=40)
    for of, target, message in (
        (small, "merged", "model.layers.1.mlp.down_proj.weight is not in the model"),
        (narrow, "merged", "model.layers.0.mlp.down_proj.lora_A is [4, 48], expected [4, 40]"),
        (base, "adapter", "is not empty"),
        (base, "base/merged", "is inside"),
    ):
        assert merged(of, adapter, tmp_path / target) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (8, "lora_A is [4, 32], expected [8, 32]"),
        (0, "r is 0, expected a rank of at least 1"),
        (4.0, "r is 4.0, expected a rank"),
        (True, "r is True, expected a rank"),
    ],
)
def test_a_config_of_another_rank_is_refused(
    tmp_path: Path, rank: float, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The matrices have rank 4: a wrong one would change the scale."""
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    file = Path(adapter, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "r": rank}))
    assert merged(base, adapter, tmp_path / "merged") == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("count", [2, 6])
def test_experts_of_another_count_are_refused(
    tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_mixtral(tmp_path / "base")
    model = peft_model(base, targets=(), target_parameters=EXPERTS)
    adapter = write_peft(model, tmp_path / "adapter")
    other = write_mixtral(tmp_path / "other", num_local_experts=count)
    assert merged(other, adapter, tmp_path / "merged") == 2
    assert f"lora_A and lora_B are [16, 48] and [32, 16], expected [{4 * count}, 48]" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "merged").exists()
    assert merged(base, adapter, tmp_path / "merged") == 0


def test_another_base_of_the_same_shapes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where PEFT's settings name a folder that is here, or the file's digest tells."""
    base, other = (write_llama(tmp_path / f"{seed}", 61, seed=seed) for seed in (1, 2))
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    assert merged(other, adapter, tmp_path / "of another") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"names {base} as its base, whose weights differ from those in {other}" in message
    settings = Path(adapter, "adapter_config.json")
    settings.write_text(settings.read_text().replace(base, "hub/llama"))
    assert merged(other, adapter, tmp_path / "of any") == 0
    file = Path(adapter, "adapter_model.safetensors")
    save_file(load_file(file), file, metadata=metadata_of(weights_digest(base)))
    assert merged(other, adapter, tmp_path / "of another") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"trained beside other weights (hub/llama) than those in {other}" in message
    assert not (tmp_path / "of another").exists()
    assert merged(base, adapter, tmp_path / "merged") == 0


def test_initial_weights_are_not_named() -> None:
    """No folder has them."""
    seed = weight_source(None, 3)["digest"]
    assert metadata_of(None) == metadata_of(seed) == {"format": "pt"}


def test_tokenizer_and_settings_of_generation_go_along(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", 61)
    for name in (*BESIDE, "README.md"):
        Path(base, name).write_text(f"{{}} {name}")
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    assert merged(base, adapter, tmp_path / "merged") == 0
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        *BESIDE,
        "config.json",
        "model.safetensors",
    }
    for name in BESIDE:
        assert (tmp_path / "merged" / name).read_text() == f"{{}} {name}"
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["experts", "latent attention"])
def test_bf16_weights_of_other_layers_are_merged_with_one_rounding(
    tmp_path: Path, kind: str
) -> None:
    """Against PEFT's merge in float64: half a unit in the last place is 2**-8 of a number."""
    options: dict[str, Any] = {"targets": LATENT}
    if kind == "experts":
        base, options = write_mixtral(tmp_path / "fp32"), {"target_parameters": EXPERTS}
    else:
        base = write_latent(tmp_path / "fp32", "deepseek_v2")
    narrow = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(narrow)
    adapter = write_peft(peft_model(narrow, **options), tmp_path / "adapter")
    assert merged(narrow, adapter, tmp_path / "merged") == 0
    exact = merged_by_peft_exactly(narrow, adapter)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    before = AutoModelForCausalLM.from_pretrained(narrow, dtype="auto").state_dict()
    wanted = exact.state_dict()
    changed = 0
    for key, weight in stored.state_dict().items():
        assert weight.dtype is before[key].dtype
        error = (weight.double() - wanted[key].double()).abs()
        assert (error <= wanted[key].abs() * 2**-8 * (1 + 1e-4)).all(), key
        changed += not torch.equal(weight, before[key])
    assert changed == {"experts": 2 * (4 + 2), "latent attention": 2 * len(LATENT)}[kind]
    tokens, _ = random_batch()
    with torch.no_grad():
        ours, theirs = (one.float()(input_ids=tokens).logits for one in (stored, exact.bfloat16()))
    assert largest_difference(ours, theirs) < 2**-7
