"""Position biases that plugins add to a run: kept in a checkpoint of ascend-run, else refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from ascend_run.core.checkpoint import FileStore
from ascend_run.plugin_api import TensorShard
from tests.support.installed import Install, offer, offer_declared

from .megatron_files import HIDDEN, hugging_face
from .test_command import FAMILY, convert, refused

BIASED = """
from ascend_run.plugin_api import AttentionFeatures, Manifest, hookimpl

class Plugin:
    manifest = Manifest(
        name="slanted", summary="", attention_needs=AttentionFeatures(position_bias=True)
    )

    @hookimpl
    def ascend_position_bias(self, config):
        return None
"""
BIAS_OF_FAMILY = """
    from ascend_run.plugin_api import hookimpl

    @hookimpl
    def ascend_position_bias(self, config):
        return None
"""


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    """A folder for targets, in which no plugin is installed."""
    (tmp_path / "targets").mkdir()
    return tmp_path / "targets"


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    hugging_face(tmp_path / "theirs")
    assert convert("--to", "ascend-run", tmp_path / "theirs", tmp_path / "run") == 0
    return tmp_path / "run"


def change(run: Path, old: str, new: str) -> None:
    file = run / "config.toml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def enable(run: Path, *names: str, **options: object) -> None:
    """Write the config of a run with these features."""
    change(run, "\nenable = []", f"\nenable = {json.dumps(names)}")
    file = run / "config.toml"
    values = "".join(f"{key} = {value}\n" for key, value in options.items())
    file.write_text(f"{file.read_text()}\n[plugins.{names[0]}]\n{values}")


def test_alibi_of_a_run_is_kept_or_refused(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enable(imported, "alibi", max_bias=4.0)
    for target in ("mp-rank", "mp-rank-legacy", "torch-dist", "hf"):
        message = refused(capsys, "--to", target, imported, tmp_path / "out")
        assert f"this model cannot be written as {target}; use --to ascend-run" in message
        assert "plugin alibi adds a position bias" in message
    assert convert("--to", "ascend-run", imported, tmp_path / "out") == 0
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert config["enable"] == ["alibi"]
    assert config["plugins"] == {"alibi": {"distance": "linear", "max_bias": 4.0}}
    message = refused(capsys, "--to", "mp-rank", tmp_path / "out", tmp_path / "again")
    assert "plugin alibi adds a position bias" in message


def test_adapters_beside_alibi_are_refused(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model/decoder.layers.0.self_attention.linear_proj.adapter.lora_"
    matrices = {"A": torch.ones(2, HIDDEN), "B.linear_proj": torch.ones(HIDDEN, 2)}
    shards = [
        TensorShard(key=name + part, tensor=one, global_shape=(*one.shape,), offset=(0, 0))
        for part, one in matrices.items()
    ]
    record = {"alpha": 2.0, "rslora": False, "base": "not compared"}
    FileStore(imported / "checkpoints").save(7, shards, {"lora": record})
    assert convert("--to", "peft", imported, tmp_path / "adapter") == 0
    enable(imported, "alibi", max_bias=4.0)
    message = refused(capsys, "--to", "peft", imported, tmp_path / "out")
    assert "plugin alibi adds a position bias" in message


def test_a_bias_of_another_package_is_refused(
    imported: Path, targets: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "slanted", BIASED)
    offer(install, "relay")
    enable(imported, "relay", "slanted", size=2)
    for target in ("hf", "mp-rank"):
        message = refused(capsys, "--to", target, imported, targets / "out")
        assert "plugin slanted adds a position bias" in message
        assert "relay" not in message


def test_a_plugin_that_declares_its_claims_is_not_imported(
    imported: Path, targets: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = 'summary = ""\nrequires_api = "==0"\nclaims = {}'
    broken = "raise ImportError('imported')\n"
    offer_declared(install, "upright", declared.format('["norm"]'), broken)
    enable(imported, "upright")
    assert convert("--to-hf", imported, targets / "out") == 0
    offer_declared(install, "slanted", declared.format('["position-bias"]'), broken)
    change(imported, '["upright"]', '["slanted"]')
    assert "imported" in refused(capsys, "--to-hf", imported, targets / "other")


def test_a_plugin_that_is_not_installed_is_named(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enable(imported, "gone-for-good")
    message = refused(capsys, "--to-hf", imported, tmp_path / "out")
    assert "one may add a position bias to the model; install them" in message
    assert "unknown plugin 'gone-for-good'" in message


def test_a_family_of_another_package_with_a_bias(
    tmp_path: Path, targets: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"ascend_run.models": {"our_llama": "fake_our_llama:Plugin"}}
    source = FAMILY.replace('model_type="our_llama"', 'model_type="llama"')
    source = source.replace("OurLlama", "Llama").replace('"Our",', '"Our", name="our_llama",')
    install("ascend-run-our-llama", points, {"fake_our_llama.py": source + BIAS_OF_FAMILY})
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    hugging_face(theirs)
    assert convert("--to", "ascend-run", "--family", "our_llama", theirs, run) == 0
    for target in ("mp-rank", "torch-dist"):
        message = refused(capsys, "--to", target, run, targets / "out")
        assert "model family our_llama adds a position bias to the attention scores" in message
    assert convert("--to", "hf", run, targets / "hf") == 0
    assert convert("--to", "mp-rank", "--family", "llama", theirs, tmp_path / "ranks") == 0
    (tmp_path / "ranks" / "config.toml").rename(tmp_path / "config.toml")
    words = ("--to", "hf", "--family", "our_llama", tmp_path / "ranks")
    message = refused(capsys, *words, targets / "again")
    assert "which cannot say the position bias of the model family our_llama; name" in message
    config = ("--config", tmp_path / "config.toml")
    assert convert(*config, *words, targets / "again") == 0
