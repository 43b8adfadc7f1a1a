"""Adapters in PEFT's format, merged on the way, against the formula. PEFT's own: plugins/lora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.family_checks import stored

from .megatron_files import FFN, HIDDEN, hugging_face
from .test_mp_rank import check_equal, convert

RANK, ALPHA = 2, 5
TARGETS = {
    "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "model.layers.1.self_attn.o_proj": (HIDDEN, HIDDEN),
    "model.layers.2.mlp.up_proj": (FFN, HIDDEN),
    "model.layers.3.mlp.down_proj": (HIDDEN, FFN),
    "lm_head": (37, HIDDEN),
}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}


def write_adapter(folder: Path, **changes: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Write random matrices; return (A, B) by module."""
    generator = torch.Generator().manual_seed(7)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    matrices = {
        module: (
            torch.randn(RANK, columns, generator=generator),
            torch.randn(rows, RANK, generator=generator),
        )
        for module, (rows, columns) in TARGETS.items()
    }
    named = {
        f"base_model.model.{module}.lora_{part}.weight": matrix
        for module, both in matrices.items()
        for part, matrix in zip("AB", both, strict=True)
    }
    save_file(named, folder / "adapter_model.safetensors")
    return matrices


@pytest.mark.parametrize(
    ("words", "dtype", "rslora"),
    [
        ("--to mp-rank --tp 2 --pp 2", torch.bfloat16, False),
        ("--to ascend-run", torch.float32, True),
        ("--to torch-dist", torch.float64, False),
        ("--to hf", torch.bfloat16, True),
    ],
)
def test_an_adapter_is_merged_in_a_wide_dtype_into_any_format(
    words: str, dtype: torch.dtype, rslora: bool, tmp_path: Path
) -> None:
    hf = {name: one.to(dtype) for name, one in hugging_face(tmp_path / "hf").items()}
    save_file(hf, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    matrices = write_adapter(tmp_path / "adapter", use_rslora=rslora)
    adapter = ("--adapter", tmp_path / "adapter", "--verify", "tensors")
    assert convert(*words.split(), *adapter, tmp_path / "hf", tmp_path / "out") == 0
    last = tmp_path / "out"
    if "hf" not in words:
        last = tmp_path / "last"
        assert convert("--to", "hf", tmp_path / "out", last) == 0
    scale = ALPHA / (RANK**0.5 if rslora else RANK)
    want = dict(hf)
    for module, (a, b) in matrices.items():
        wide = torch.promote_types(dtype, torch.float32)
        weight = f"{module}.weight"
        want[weight] = (hf[weight].to(wide) + scale * (b.to(wide) @ a.to(wide))).to(dtype)
        assert not torch.equal(want[weight], hf[weight])
    got = stored(last)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == dtype
        if name.removesuffix(".weight") in TARGETS:  # a matmul of other shapes: other rounding
            eps = 2.5e-13 if dtype == torch.float64 else torch.finfo(dtype).eps
            torch.testing.assert_close(got[name], tensor, rtol=eps, atol=4 * eps)
        else:
            assert torch.equal(got[name], tensor), name


def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hugging_face(tmp_path / "hf", tied=True)
    folder, out = tmp_path / "adapter", tmp_path / "new" / "out"

    def message(*words: str | Path) -> str:
        assert convert("--to", "mp-rank", *words, tmp_path / "hf", out) == 2
        assert not out.parent.exists()
        return capsys.readouterr().err

    assert f"no folder at {folder}" in message("--adapter", folder)
    write_adapter(folder, lora_bias=True, r=3, fan_in_fan_out=True)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(2, HIDDEN)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(2, 37)
    save_file(tensors, file)
    found = message("--adapter", folder)
    for part in (
        "lora_bias is true; only false can be merged",
        "lm_head.weight is not in the model",  # tied to the embedding
        "model.layers.9.mlp.up_proj.weight is not in the model",
        "model.layers.0.self_attn.q_proj.lora_A is [2, 16], expected [3, 16]",
        "model.layers.3.mlp.down_proj: fan_in_fan_out is True, expected False",
        "lora_embedding_A is no matrix of a linear layer",
    ):
        assert part in found
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file} cannot be read" in message("--adapter", folder)
    file.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in message("--adapter", folder)
    assert "--base goes with the adapters of a run" in message("--base", folder)
    assert stored(tmp_path / "hf").keys() == hf.keys()
    check_equal(stored(tmp_path / "hf"), hf)
