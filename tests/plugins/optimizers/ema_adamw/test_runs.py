"""Whole runs: resumed, evaluated with the averaged weights, and converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ascend_run.entrypoints.cli import run
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import STEPS, Ended, Runs, assert_same, write_tokens
from tests.support.family_checks import stored
from tests.support.tiny_llama import write_llama

NAME: Final = ("ema-adamw",)
OPTIONS: Final[Mapping[str, Any]] = {
    **DENSE,
    "optimizer.lr": 0.01,
    "plugins.ema-adamw.decay": 0.7,
    "train.eval_interval": 2,
}
BF16: Final = {"train.precision": "bf16"}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
OVERLAPPED: Final = {
    **DISTRIBUTED,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.bucket_size": 4000,
}
KINDS: Final = [
    pytest.param({}, 1, id="fp32"),
    pytest.param(BF16, 1, id="bf16"),
    pytest.param(DISTRIBUTED, 2, id="fp32 distributed"),
    pytest.param({**BF16, **OVERLAPPED}, 2, id="bf16 overlapped"),
]


def evaluations(ended: Ended) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in ended.readings if "eval_loss" in line}


def losses(ended: Ended) -> list[float]:
    return [line["loss"] for line in ended.readings if "loss" in line]


@pytest.mark.exhaustive(by=lambda values, ranks: [*values, ranks])
@pytest.mark.parametrize(("values", "ranks"), KINDS)
def test_an_evaluation_with_averages_leaves_every_bit_of_training(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    """And it differs from that of the weights, after the first step."""
    runs = Runs(gloo_pool, tmp_path, ({**OPTIONS, **values}, ranks, NAME))
    plain = runs("plain")
    averaged = runs("averaged", **{"plugins.ema-adamw.evaluate": True})
    assert_same(averaged, plain)
    assert losses(averaged[0]) == losses(plain[0])
    weights, averages = evaluations(plain[0]), evaluations(averaged[0])
    assert weights.keys() == averages.keys() == {0, 2, 4, STEPS}
    assert [step for step in weights if weights[step] == averages[step]] == [0]


@pytest.mark.exhaustive(by=lambda values, ranks: [*values, ranks])
@pytest.mark.parametrize(("values", "ranks"), KINDS)
def test_exported_averages_have_the_loss_of_the_last_evaluation(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    """A run of the built-in optimizer from the exported folder evaluates them before its start."""
    runs = Runs(gloo_pool, tmp_path, ({**OPTIONS, **values}, ranks, NAME))
    options: dict[str, Any] = {"plugins.ema-adamw.evaluate": True}
    (ended, *_) = runs("begun", **options, checkpoint__save_interval=STEPS)
    words = ["convert", "--to", "hf", "--verify", "tensors", str(tmp_path / "begun")]
    assert run([*words, "--weights", "ema", str(tmp_path / "averages")]) == 0
    assert run([*words, str(tmp_path / "weights")]) == 0
    runs.plugins = ()
    runs.values = {k: v for k, v in runs.values.items() if not k.startswith("plugins.")}
    for folder, same in (("averages", True), ("weights", False)):
        (again, *_) = runs(f"from {folder}", model__hf_path=str(tmp_path / folder))
        assert (evaluations(again)[0] == evaluations(ended)[STEPS]) is same


def test_a_state_is_rounded_to_the_dtype_of_the_weights(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Master weights round to the weights; the average of each is that of the run."""
    runs = Runs(gloo_pool, tmp_path, ({**OPTIONS, **BF16, **DISTRIBUTED}, 2, NAME))
    ended = runs("begun", checkpoint__save_interval=STEPS)
    source = str(tmp_path / "begun")
    found: dict[str, dict[str, Tensor]] = {}
    for state in ("", "main_param", "ema"):
        words = ["--weights", state] if state else []
        target = tmp_path / f"out {state}"
        assert run(["convert", "--to", "hf", *words, source, str(target)]) == 0
        found[state] = stored(target)
    assert found["main_param"].keys() == found[""].keys() == found["ema"].keys()
    for name, tensor in found[""].items():
        assert torch.equal(found["main_param"][name], tensor)
        assert found["ema"][name].dtype == tensor.dtype == torch.bfloat16
    (norm,) = (
        t for key, t in ended[0].tensors.items() if key.startswith("optimizer/ema/decoder.final")
    )
    exported = found["ema"]["model.norm.weight"]
    assert torch.equal(exported[: norm.numel()], norm.bfloat16())
    assert not torch.equal(exported, found[""]["model.norm.weight"])


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    ("values", "ranks"),
    [pytest.param(BF16, 1, id="bf16"), pytest.param({**BF16, **OVERLAPPED}, 2, id="overlapped")],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    options = {**OPTIONS, **values, "plugins.ema-adamw.warmup": True, "train.eval_interval": 0}
    Runs(gloo_pool, tmp_path, (options, ranks, NAME)).assert_the_same_in_two_halves()


def test_a_state_that_is_not_there_is_refused(
    gloo_pool: GlooPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(gloo_pool, tmp_path, (OPTIONS, 1, NAME))
    runs("begun", checkpoint__save_interval=STEPS)
    words = ["convert", "--to", "hf", "--weights"]
    for state in ("step", "average"):
        assert run([*words, state, str(tmp_path / "begun"), str(tmp_path / "out")]) == 2
        assert "it has ema, exp_avg, exp_avg_sq" in " ".join(capsys.readouterr().err.split())
    assert run([*words, "ema", "--from", "hf", str(tmp_path / "begun"), str(tmp_path / "out")]) == 2
    assert "--weights goes with a run" in capsys.readouterr().err


@pytest.mark.needs_plugins("lora")
def test_averaged_adapters_are_exported_too(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """In PEFT's format, and merged."""
    base = write_llama(tmp_path / "base", 61)
    values = {
        **OPTIONS,
        "model.hf_path": base,
        "data.seq_length": 32,
        "plugins.lora.export": False,
        "plugins.lora.target_modules": ["linear_proj"],
    }
    for key in [key for key in values if key.startswith("model.") and key != "model.hf_path"]:
        del values[key]
    values["model.family"] = "llama"
    runs = Runs(gloo_pool, tmp_path, (values, 1, (*NAME, "lora")))
    runs.data["data.train"] = [write_tokens(tmp_path / "train", 61, 40, seed=1)]
    runs.data["data.validation"] = [write_tokens(tmp_path / "validation", 61, 10, seed=2)]
    (ended,) = runs("begun", checkpoint__save_interval=STEPS)
    words = ["convert", "--weights", "ema", "--verify", "tensors", str(tmp_path / "begun")]
    assert run([*words, "--to", "peft", str(tmp_path / "peft")]) == 0
    assert run([*words, "--to", "hf", str(tmp_path / "merged")]) == 0

    averages = {key: t for key, t in ended.tensors.items() if key.startswith("optimizer/ema/")}
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(exported) == len(averages) > 0
    for tensor in averages.values():
        assert any(torch.equal(tensor, one) for one in exported.values())
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"
    product = 2.0 * exported[name.format("B")] @ exported[name.format("A")]
    weight = "model.layers.1.self_attn.o_proj.weight"
    before, merged = stored(Path(base)), stored(tmp_path / "merged")
    torch.testing.assert_close(merged[weight], before[weight] + product, rtol=1e-6, atol=1e-7)
    assert not torch.equal(merged[weight], before[weight])
