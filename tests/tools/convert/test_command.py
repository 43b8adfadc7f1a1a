"""``ascend-run convert`` as a user meets it, on folders that transformers wrote and reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.core.checkpoint import FileStore
from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import TensorShard
from ascend_run.testing.training_run import run as train
from tests.support.family_checks import stored
from tests.support.installed import Install, offer

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-bf16": lambda: llama().bfloat16(),
    "mixtral": mixtral,
    "gpt2": gpt2,
}


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases as well
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "theirs")


@pytest.fixture
def imported(theirs: Path, tmp_path: Path) -> Path:
    assert run(["convert", "--from-hf", str(theirs), str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def convert(*words: str | Path) -> int:
    return run(["convert", *map(str, words)])


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_becomes_a_checkpoint_and_the_same_folder_again(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs, ours, again = save(kind, tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    assert convert("--from-hf", theirs, ours) == 0
    assert convert("--to-hf", ours, again) == 0
    want, got = stored(theirs), stored(again)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    model, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(theirs).eval()(input_ids=tokens).logits
        assert torch.equal(model.eval()(input_ids=tokens).logits, reference)


def test_every_way_to_name_a_checkpoint_gives_the_same(imported: Path, tmp_path: Path) -> None:
    FileStore(imported / "checkpoints").verify(0)
    places = {
        "whole": imported,
        "folder": imported / "checkpoints",
        "one": imported / "checkpoints" / "step_00000000",
    }
    for name, place in places.items():
        assert convert("--to-hf", place, tmp_path / name) == 0
    assert convert("--to-hf", imported, tmp_path / "numbered", "--step", "0") == 0
    written = [stored(tmp_path / name) for name in (*places, "numbered")]
    assert all(part.keys() == written[0].keys() for part in written)
    assert all(torch.equal(part[name], written[0][name]) for part in written for name in part)


def test_a_target_inside_its_source_is_refused(
    theirs: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = imported / "checkpoints"
    for direction, source, target in (
        ("--from-hf", theirs, theirs / "run"),
        ("--to-hf", imported, checkpoints / "step_00000007"),
        ("--to-hf", checkpoints / "step_00000000", checkpoints / "step_00000000" / "hf"),
    ):
        assert convert(direction, source, target) == 2
        assert f"TARGET ({target}) is inside SOURCE" in capsys.readouterr().err
        assert not target.exists()
    assert convert("--to-hf", imported, imported / "exported") == 0


def test_the_step_that_is_named_is_the_one_that_is_written(imported: Path, tmp_path: Path) -> None:
    store = FileStore(imported / "checkpoints")
    manifest = store.manifest(0)
    shards = [
        TensorShard(
            key=key,
            tensor=torch.zeros(tensor.global_shape),
            global_shape=tensor.global_shape,
            offset=(0,) * len(tensor.global_shape),
        )
        for key, tensor in manifest.tensors.items()
    ]
    store.save(7, shards, {})
    assert convert("--to-hf", imported, tmp_path / "newest") == 0
    assert not any(tensor.any() for tensor in stored(tmp_path / "newest").values())
    assert convert("--to-hf", imported, tmp_path / "first", "--step", "0") == 0
    assert all(tensor.any() for tensor in stored(tmp_path / "first").values())


def test_the_written_files_are_reported_as_json(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert convert("--to-hf", imported, tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    size = sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert told == {
        "family": "llama",
        "folder": str(tmp_path / "out"),
        "step": 0,
        "tensors": 15,
        "bytes": size,
    }


@pytest.mark.exhaustive(by=lambda kind: [kind] if kind == "mixtral" else [])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt2", "tensor_model_parallel_size"),
        ("mixtral", "expert_model_parallel_size"),
    ],
)
def test_a_run_on_two_ranks_exports_the_model_that_it_holds(
    kind: str, layout: str, tmp_path: Path
) -> None:
    """It starts from a folder, and its learning rate is 0."""
    theirs = save(kind, tmp_path / "theirs")
    values = {"model.hf_path": str(theirs), f"parallel.{layout}": 2, "optimizer.lr": 0.0}
    trained = train(kind, values, ranks=2, steps=1)
    shutil.move(theirs, tmp_path / "moved")  # which the run's config still names
    assert convert("--to-hf", trained.folder, tmp_path / "out") == 0
    want, got = stored(tmp_path / "moved"), stored(tmp_path / "out")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


# -- bad input --------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one message of a refusal, with exit code 2 and nothing written."""
    capsys.readouterr()
    before = set(Path(words[-1]).parent.rglob("*"))
    assert convert(*words) == 2
    assert set(Path(words[-1]).parent.rglob("*")) == before
    return capsys.readouterr().err


def test_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    message = refused(capsys, "--to-hf", tmp_path / "gone", out)
    assert message.startswith(f"error: no folder at {tmp_path}/gone")
    assert "Traceback" not in message
    message = refused(capsys, "--from-hf", tmp_path / "gone", out)
    assert f"no Hugging Face folder at {tmp_path}/gone" in message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "expected a JSON object"),
        ("latest_checkpointed_iteration.txt", "iter_0000001 is missing"),
        ("notes.txt", "has no checkpoint of a known format"),
    ],
)
def test_a_checkpoint_that_others_wrote(
    file: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / file).write_text("1")
    assert words in refused(capsys, "--to-hf", foreign, tmp_path / "out")


def test_a_checkpoint_without_the_config_of_its_run(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "elsewhere.toml"
    (imported / "config.toml").rename(config)
    message = refused(capsys, "--to-hf", imported, tmp_path / "out")
    assert "no config.toml" in message
    assert "--config" in message
    assert convert("--to-hf", imported, tmp_path / "out", "--config", config) == 0


def test_a_checkpoint_that_is_corrupt(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (imported / "checkpoints" / "step_00000000").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "no valid checkpoint" in refused(capsys, "--to-hf", imported, tmp_path / "out")


def test_a_step_that_is_not_there(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    message = refused(capsys, "--step", "3", "--to-hf", imported, out)
    assert "no checkpoint of step 3; available: 0" in message
    one = imported / "checkpoints" / "step_00000000"
    assert "is of step 0, not of step 3" in refused(capsys, "--step", "3", "--to-hf", one, out)


def test_a_family_that_is_not_installed(
    theirs: Path,
    imported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    install: Install,
) -> None:
    out = tmp_path / "out"
    config_json = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config_json | {"model_type": "bert"}))
    message = refused(capsys, "--from-hf", theirs, out)
    assert "model_type 'bert'" in message
    assert "llama, minicpm" in message
    config = (imported / "config.toml").read_text()
    (imported / "config.toml").write_text(config.replace('family = "llama"', 'family = "lama"'))
    message = refused(capsys, "--to-hf", imported, out)
    assert "'lama'" in message
    assert "llama" in message
    offer(install, "relay")
    assert "is a feature" in refused(capsys, "--family", "relay", "--to-hf", imported, out)


FAMILY = """
from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest

class Plugin(FamilyPlugin):
    family = derived(
        DECODER,
        model_type="our_llama",
        architecture="OurLlamaForCausalLM",
        key_defaults={"rms_norm_eps": 1e-6},
        fixed={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    )
    manifest = family_manifest(family, "Our", source="")
"""


def test_a_family_of_another_package_is_found_by_its_model_type(
    theirs: Path, tmp_path: Path, install: Install
) -> None:
    points = {"ascend_run.models": {"our_llama": "fake_our_llama:Plugin"}}
    install("ascend-run-our-llama", points, {"fake_our_llama.py": FAMILY})
    config_json = json.loads((theirs / "config.json").read_text())
    config_json |= {"model_type": "our_llama", "architectures": ["OurLlamaForCausalLM"]}
    (theirs / "config.json").write_text(json.dumps(config_json))

    assert convert("--from-hf", theirs, tmp_path / "run") == 0
    assert convert("--to-hf", tmp_path / "run", tmp_path / "again") == 0

    assert 'family = "our_llama"' in (tmp_path / "run/config.toml").read_text()
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "our_llama"
    want, got = stored(theirs), stored(tmp_path / "again")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_a_model_that_the_family_cannot_be(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "--family", "gpt2", "--to-hf", imported, tmp_path / "out")
    assert "this model cannot be written as a Hugging Face gpt2" in message
    assert "model.normalization is 'RMSNorm'" in message


def test_a_target_that_exists(
    theirs: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--to-hf", imported, theirs), ("--from-hf", theirs, imported)):
        assert "exists and is not empty; name a new folder" in refused(capsys, *words)


def test_a_folder_with_a_tensor_too_few(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_json = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config_json | {"num_hidden_layers": 3}))
    message = refused(capsys, "--from-hf", theirs, tmp_path / "out")
    assert "model.layers.2.input_layernorm.weight is missing" in message


def test_the_way_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--to-hf or --from-hf" in refused(capsys, tmp_path, tmp_path / "out")
    words = ("--step", "1", "--from-hf", tmp_path, tmp_path / "out")
    assert "do not go with a Hugging Face folder" in refused(capsys, *words)
