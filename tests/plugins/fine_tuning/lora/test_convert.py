"""``ascend-run convert`` merges and writes the adapters of a run, and merges those of PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run, write_tokens
from tests.support.generated import generated, write_words
from tests.support.tiny_llama import write_llama

from .merged_models import check_merged, convert, merged_by_peft, written_as_exported
from .peft_models import ALPHA, RANK, peft_model, write_peft


def test_an_adapter_of_peft_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", 61)
    sizes = {"rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 6}, "alpha_pattern": {"q_.*": 9}}
    adapter = write_peft(peft_model(base, use_rslora=True, **sizes), tmp_path / "adapter")
    assert convert("--to", "mp-rank", "--tp", "2", base, tmp_path / "files") == 0
    assert convert("--to", "hf", "--adapter", adapter, tmp_path / "files", tmp_path / "out") == 0
    check_merged(tmp_path / "out", base, merged_by_peft(base, adapter), 14)


@pytest.mark.exhaustive(by=lambda contents: [contents] if contents == "adapters" else [])
@pytest.mark.parametrize("contents", ["adapters", "full"])
def test_a_run_on_two_ranks_becomes_its_merged_model(
    contents: str, tmp_path: Path, gloo_pool: GlooPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against PEFT's merge of the adapter that the run exports; queries, values, gate and proj."""
    base = write_llama(tmp_path / "base", 61)
    Path(base, "tokenizer.json").write_text("{}")
    values = {
        "run.output_dir": str(tmp_path / "run"),
        "model.family": "llama",
        "model.hf_path": base,
        "data.train": [write_tokens(tmp_path / "tokens", 61, 40, 1)],
        "data.seq_length": 32,
        "parallel.tensor_model_parallel_size": 2,
        "train.train_iters": 3,
        "train.global_batch_size": 4,
        "train.precision": "fp32",
        "optimizer.lr": 0.05,
        "checkpoint.save_interval": 3,
        "plugins.lora.rank": RANK,
        "plugins.lora.alpha": float(ALPHA),
        "plugins.lora.rslora": True,
        "plugins.lora.rank_pattern": {"linear_v": 2, "linear_fc2": 6},
        "plugins.lora.alpha_pattern": {"linear_qkv": 3.0, "linear_v": 5.0},
        "plugins.lora.checkpoint": contents,
        "plugins.lora.target_modules": [
            "linear_q", "linear_v", "linear_fc1_gate", "linear_proj", "linear_fc2"
        ],
    }  # fmt: skip
    gloo_pool.run(whole_run, 2, values, ("lora",), timeout=100)
    want = merged_by_peft(base, tmp_path / "run" / "adapter")
    if contents == "full":
        Path(base).rename(tmp_path / "moved")
        base = str(tmp_path / "moved")
    target = tmp_path / "out"
    assert convert("--to", "hf", "--verify", "tensors", tmp_path / "run", target) == 0
    assert "adapters merged into 8 tensors" in capsys.readouterr().out
    check_merged(target, base, want, 10)
    prompt = ("w3 w1 w4", "--tokenizer", write_words(tmp_path, 61), "--max-new-tokens", 8)
    answers = [generated(folder, *prompt) for folder in (tmp_path / "run", target, base)]
    assert answers[0] == answers[1] != answers[2]
    settings = written_as_exported(tmp_path / "run", tmp_path / "written")
    assert settings["rank_pattern"] == {"down_proj": 6, "v_proj": 2}
    assert settings["alpha_pattern"] == {"q_proj": 3, "v_proj": 5}
    assert (target / "tokenizer.json").exists() == (contents == "adapters")
    if contents == "full":
        return
    other = write_llama(tmp_path / "other", 61, seed=2)
    words = ("--to", "hf", tmp_path / "run", tmp_path / "new")
    assert convert("--base", other, *words) == 2
    assert (
        f"were trained beside other weights than those in {other}; name their folder with --base"
        in " ".join(capsys.readouterr().err.split())
    )
    Path(base).rename(tmp_path / "moved")
    assert convert(*words) == 2
    assert f"no Hugging Face folder at {base}" in capsys.readouterr().err
    assert convert("--base", tmp_path / "moved", *words) == 0
    assert load_file(tmp_path / "new/model.safetensors").keys() == want.keys()
    capsys.readouterr()
    for adapter in ("run/adapter", "written"):
        assert convert("--to", "hf", "--adapter", tmp_path / adapter, other, tmp_path / "o") == 2
        assert "trained beside other weights" in capsys.readouterr().err
    assert convert("--to", "peft", "--base", other, tmp_path / "run", tmp_path / "for other") == 0
    assert convert("--to", "hf", "--adapter", tmp_path / "for other", other, tmp_path / "o") == 0
