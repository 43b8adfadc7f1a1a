"""Biases of experts and attention sinks in Megatron's files: gpt-oss."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.support.family_checks import stored

from .biased_files import BiasedRank, biased_hugging_face
from .megatron_files import EXPERTS
from .test_mp_rank import ENGINE, check_equal, convert, rank_files

GROUPED: Final = f"{ENGINE} --moe-grouped-gemm"
CASES: Final = {
    # words, and: tp, ep, expert tp, pp * vpp, numbered
    "sequential": ("--ep 2", (1, 2, 1, 1, False)),
    "whole experts by default": ("--tp 2 --ep 2 --pp 2", (2, 2, 1, 2, False)),
    "expert tp": ("--tp 2 --ep 2 --expert-tp 2", (2, 2, 2, 1, False)),
    "expert tp of four": ("--tp 4 --expert-tp 2 --ep 2", (4, 2, 2, 1, False)),
    "numbered": (f"--tp 2 --pp 2 --vpp 2 {GROUPED}", (2, 1, 1, 4, True)),
    "numbered expert tp": (f"--tp 2 --ep 2 --expert-tp 2 {GROUPED}", (2, 2, 2, 1, True)),
    "extended": ("--tp 2 --moe-tp-extend-ep", (2, 2, 1, 1, False)),
}


@pytest.fixture
def hf(tmp_path: Path) -> dict[str, Tensor]:
    return biased_hugging_face(tmp_path / "hf")


def chunks(state: Mapping[str, Any]) -> list[Mapping[str, Tensor]]:
    return [state[key] for key in state if re.fullmatch(r"model\d*", key)]


def stored_rank(folder: Path, rank: str) -> tuple[dict[str, Any], Path]:
    (file,) = folder.glob(f"iter_*/{rank}/*.pt")
    return torch.load(file, weights_only=False), file


@pytest.mark.exhaustive(by=lambda kind: [w for w in CASES[kind][0].split() if w.startswith("--")])
@pytest.mark.parametrize("kind", CASES)
def test_biases_are_where_the_rules_have_them(
    kind: str, hf: Mapping[str, Tensor], tmp_path: Path
) -> None:
    """Those of gate and up sharded half by half, those of fc2 whole on every rank; and back."""
    words, (tp_size, ep_size, expert_tp, stages, numbered) = CASES[kind]
    target = tmp_path / "megatron"
    assert convert("--to", "mp-rank", *words.split(), tmp_path / "hf", target) == 0
    files = rank_files(target)
    each, pipeline = 4 // stages, 2 if "--pp" in words else 1
    for folder, state in files.items():
        tp, *others = (int(part) for part in folder.removeprefix("mp_rank_").split("_"))
        pp = others.pop(0) if "--pp" in words else 0
        ep = tp if kind == "extended" else others.pop(0) if others else 0
        rank = BiasedRank(
            tp=tp,
            ep=ep,
            tp_size=tp_size,
            ep_size=ep_size,
            expert_tp_size=expert_tp,
            numbered=numbered,
        )
        for number, chunk in enumerate(chunks(state)):
            for slot in range(each):
                at = f"decoder.layers.{slot}."
                held = {n.removeprefix(at): t for n, t in chunk.items() if n.startswith(at)}
                want = rank.layer(hf, (number * pipeline + pp) * each + slot)
                check_equal({n: t for n, t in held.items() if "expert" in n or n in want}, want)
    assert convert("--to", "hf", target, tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)


@pytest.mark.parametrize("engine", [(), ENGINE.split()], ids=["local", "engine"])
def test_torch_dist_has_biases_beside_weights(
    engine: tuple[str, ...], hf: Mapping[str, Tensor], tmp_path: Path
) -> None:
    words = ("--to", "torch-dist", *engine, "--verify", "tensors")
    assert convert(*words, tmp_path / "hf", tmp_path / "dist") == 0
    (tmp_path / "dist" / "config.toml").unlink()
    family = ("--family", "gpt_oss")
    assert convert("--to", "hf", *family, tmp_path / "dist", tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)


@pytest.mark.usefixtures("hf")
@pytest.mark.parametrize("words", ["mp-rank --tp 2 --ep 2", "torch-dist"])
def test_the_args_alone_build_the_same_model(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits from the config.toml and from the args, with yarn, windows, sinks and the clamp."""
    command = ("--to", *words.split(), "--verify", "logits", "--json")
    assert convert(*command, tmp_path / "hf", tmp_path / "out") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verify"]["compared"] == 2 * 2 * 128 * 37
    assert record["settings"]["different"] == record["settings"]["not_stated"] == {}


@pytest.mark.usefixtures("hf")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("mp-rank --moe-grouped-gemm", "experts in weight1 and weight2 have no biases"),
        ("mp-rank-legacy", "softmax_offset does not exist in megatron.legacy; use mp-rank"),
        ("mp-rank --tp 4 --ep 2 --expert-tp 4 --pp 3", "not divisible by pp=3"),
    ],
)
def test_what_these_files_cannot_have(
    words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("--to", *words.split(), tmp_path / "hf", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("hf")
def test_one_option_for_all_biases_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``add_bias_linear`` beside the options of each kind, which the args say instead of it."""
    assert convert("--to", "ascend-run", tmp_path / "hf", tmp_path / "run") == 0
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    assert "add_bias_linear = false" in text
    file.write_text(text.replace("add_bias_linear = false", "add_bias_linear = true"))
    capsys.readouterr()
    command = ("--to", "torch-dist", "--verify", "tensors", "--json")
    assert convert(*command, tmp_path / "run", tmp_path / "out") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["different"] == settings["not_stated"] == {}


@pytest.mark.usefixtures("hf")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("local_experts.1.linear_fc1.bias", "fc1_bias of expert 1 is [4], expected [24]"),
        ("local_experts.1.linear_fc2.bias", "fc2_bias of expert 1 is [4], expected [16]"),
        ("local_experts.0.linear_fc2.bias", "fc2_bias is there for the experts [1, 2, 3]"),
    ],
)
def test_a_bias_that_does_not_fit(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "megatron"
    words = ["--to", "mp-rank", "--tp", "2", "--ep", "2", "--expert-tp", "2"]
    assert convert(*words, tmp_path / "hf", folder) == 0
    state, file = stored_rank(folder, "mp_rank_00_000")
    tensor = state["model"].pop(f"decoder.layers.1.mlp.experts.{name}")
    if "local_experts.1" in name:
        state["model"][f"decoder.layers.1.mlp.experts.{name}"] = tensor[:4].clone()
    torch.save(state, file)
    assert convert("--to", "hf", folder, tmp_path / "out") == 2
    assert problem in capsys.readouterr().err


@pytest.mark.usefixtures("hf")
def test_copies_of_a_bias_that_differ_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bias of fc2, which every tensor-parallel rank of an expert has."""
    folder = tmp_path / "megatron"
    assert convert("--to", "mp-rank", "--tp", "2", "--expert-tp", "2", tmp_path / "hf", folder) == 0
    name = f"decoder.layers.2.mlp.experts.local_experts.{EXPERTS - 1}.linear_fc2.bias"
    state, file = stored_rank(folder, "mp_rank_01")
    state["model"][name] = state["model"][name] + 1
    torch.save(state, file)
    assert convert("--to", "hf", folder, tmp_path / "out") == 2
    where = "decoder.layers.2.mlp.experts.fc2_bias differs between mp_rank_00 and mp_rank_01"
    assert where in capsys.readouterr().err


@pytest.mark.usefixtures("hf")
def test_a_router_bias_of_zero_is_kept(tmp_path: Path) -> None:
    """It is left out only where the model has none."""
    folder = tmp_path / "megatron"
    assert convert("--to", "mp-rank", tmp_path / "hf", folder) == 0
    state, file = stored_rank(folder, "mp_rank_00")
    state["model"]["decoder.layers.2.mlp.router.bias"].zero_()
    torch.save(state, file)
    assert convert("--to", "hf", folder, tmp_path / "out") == 0
    assert not stored(tmp_path / "out")["model.layers.2.mlp.router.bias"].any()
