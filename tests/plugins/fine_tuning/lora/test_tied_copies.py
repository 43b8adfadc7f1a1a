"""PEFT's files of a tied embedding: it and the output layer, which must be the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import prepare
from tests.support.tiny_llama import write_llama

from .lora_jobs import base_values, run_once
from .merged_models import check_merged, convert, merged_by_peft
from .peft_models import VOCAB, peft_model, random_batch, write_peft

APART = "were trained apart, and the model has one weight for both; train with ensure_weight_tying"
CASES = {
    "the embedding alone": (["embed_tokens"], False),
    "the output layer alone": (["lm_head"], False),
    "both, apart": (["embed_tokens", "lm_head"], False),
    "tied": (["embed_tokens"], True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tied") / "base"
    return write_llama(folder, vocab_size=VOCAB, tie_word_embeddings=True)


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_pefts_or_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    modules, is_tied = CASES[case]
    model = peft_model(base, modules_to_save=modules, ensure_weight_tying=is_tied)
    adapter = write_peft(model, tmp_path / "adapter")
    code = convert("--to", "hf", "--adapter", adapter, base, tmp_path / "merged")
    if is_tied:
        assert code == 0
        want = merged_by_peft(base, adapter)
        del want["lm_head.weight"]
        check_merged(tmp_path / "merged", base, want, 14 + 1)
        return
    assert code == 2
    assert f"the embedding and lm_head {APART}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "merged").exists()


def run_of(base: str, adapter: str) -> dict[str, object]:
    return {
        **base_values(base, adapter),
        "plugins.lora.target_modules": ["all-linear"],
        "plugins.lora.modules_to_save": ["word_embeddings"],
    }


@pytest.mark.parametrize("case", ["the embedding alone", "the output layer alone"])
def test_a_run_needs_both(base: str, tmp_path: Path, case: str) -> None:
    modules, _ = CASES[case]
    model = peft_model(base, modules_to_save=modules)
    adapter = write_peft(model, tmp_path / "adapter")
    with pytest.raises(AscendRunError) as refusal:
        prepare(run_of(base, adapter), ("lora",))
    assert APART in str(refusal.value)
    assert "modules_to_save=[output_layer]" not in str(refusal.value)


def test_a_run_needs_the_same(gloo_pool: GlooPool, base: str, tmp_path: Path) -> None:
    model = peft_model(base, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    adapter = write_peft(model, tmp_path / "adapter")
    gloo_pool.run(run_once, 1, run_of(base, adapter), *random_batch())
    file = Path(adapter, "adapter_model.safetensors")
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"][3, 4] += 1.0
    save_file(tensors, file)
    with pytest.raises(Exception, match="were trained apart"):
        gloo_pool.run(run_once, 1, run_of(base, adapter), *random_batch())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": None}, "r is None, expected a rank of at least 1"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"target_parameters": "down_proj"}, "target_parameters is 'down_proj', expected a list"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_of_another_type_are_one_message(
    base: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    message: str,
) -> None:
    adapter = Path(write_peft(peft_model(base), tmp_path / "adapter"))
    file = adapter / "adapter_config.json"
    settings = {**json.loads(file.read_text()), "target_parameters": ["mlp.experts.down_proj"]}
    file.write_text(json.dumps({**settings, **changes}))
    assert convert("--to", "hf", "--adapter", adapter, base, tmp_path / "merged") == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_cut_off_is_one_message(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever tensor is read first, and in whichever order they lie."""
    model = peft_model(base, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    adapter = write_peft(model, tmp_path / "adapter")
    file = Path(adapter, "adapter_model.safetensors")
    assert all(not torch.isnan(one).any() for one in load_file(file).values())
    file.write_bytes(file.read_bytes()[:-100])
    assert convert("--to", "hf", "--adapter", adapter, base, tmp_path / "merged") == 2
    assert "cannot be read" in capsys.readouterr().err
