"""``convert --verify``: the files that were written, compared with their source."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.tools.convert.differences import difference
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.model_config import ModelConfig, config_of_run
from tests.support.family_checks import stored

from .megatron_files import VOCABULARY, Files, hugging_face
from .test_mp_rank import TWO_STAGES, changed, check_equal, convert, refused

SWAPPED = tuple(f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in (1, 2))


@pytest.mark.parametrize(
    ("words", "experts"),
    [
        ("--to mp-rank --tp 2 --pp 2 --verify logits", False),
        ("--to mp-rank --ep 2 --verify tensors", True),
        ("--to torch-dist --verify tensors", False),
        ("--to ascend-run --verify logits", True),
    ],
)
def test_what_was_written_is_compared_with_its_source(
    words: str, experts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hugging_face(tmp_path / "hf", experts=experts)
    assert convert(*words.split(), "--json", tmp_path / "hf", tmp_path / "out") == 0
    record = json.loads(capsys.readouterr().out)
    verify, settings = record["verify"], record["settings"]
    kind = words.split()[-1]
    count = 2 * 128 * VOCABULARY if kind == "logits" else (4 * (7 if experts else 6) + 3)
    if "mp-rank" in words and kind == "logits":
        count *= 2  # from the config.toml beside the files, and from their args
    assert verify == {
        "kind": kind, "equal": True, "compared": count, "max_difference": 0.0, "different": {}
    }  # fmt: skip
    assert settings["compared"] > 200
    assert settings["different"] == settings["not_stated"] == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    assert convert("--to", "hf", "--verify", "tensors", tmp_path / "out", tmp_path / "again") == 0
    assert f"verified: {4 * (7 if experts else 6) + 3} tensors equal" in capsys.readouterr().out
    check_equal(stored(tmp_path / "again"), hf)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["tensors", "logits"])
@pytest.mark.parametrize("form", ["mp-rank", "ascend-run"])
def test_two_tensors_exchanged_on_the_way_leave_no_target(
    kind: str,
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf = hugging_face(tmp_path / "hf")
    plain, writing = ModelSource.tensor, [True]

    def exchanged(self: ModelSource, name: str) -> Tensor:
        if writing[0] and name in SWAPPED:
            name = SWAPPED[1 - SWAPPED.index(name)]
        return plain(self, name)

    from ascend_run.tools.convert import conversion

    compared = conversion._compared

    def comparing(*arguments: object) -> object:
        writing[0] = False
        return compared(*arguments)

    monkeypatch.setattr(ModelSource, "tensor", exchanged)
    monkeypatch.setattr(conversion, "_compared", comparing)
    words = ("--to", form, "--verify", kind, tmp_path / "hf", tmp_path / "out")
    assert convert(*words, "--json") == 1
    out, err = capsys.readouterr()
    verify = json.loads(out)["verify"]
    one, other = (hf[f"model.layers.{n}.self_attn.o_proj.weight"].double() for n in (1, 2))
    assert not verify["equal"]
    assert "it was removed" in err
    if kind == "tensors":
        assert verify["different"].keys() == {*SWAPPED}
        assert verify["max_difference"] == float((one - other).abs().max())
    else:
        assert verify["max_difference"] > 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    writing[0] = True
    assert convert(*words) == 1
    shown = SWAPPED[0] if kind == "tensors" else "elements differ, by at most"
    assert shown in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["mp-rank", "mp-rank-legacy", "torch-dist"])
@pytest.mark.parametrize("kind", ["tensors", "logits"])
def test_an_arg_that_changes_on_the_way_leaves_no_target(
    form: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the config.toml beside it is right, and what has no arg is said."""
    from ascend_run.tools.convert.formats import mp_rank_writing, torch_dist

    plain = mp_rank_writing.make_args

    def wrong(*arguments: Any, **options: Any) -> Namespace:
        args = plain(*arguments, **options)
        args.rotary_base += 1
        return args

    hugging_face(tmp_path / "hf")
    words = ("--to", form, "--verify", kind, tmp_path / "hf", tmp_path / "out")
    with monkeypatch.context() as patched:
        for module in (mp_rank_writing, torch_dist):
            patched.setattr(module, "make_args", wrong)
        assert convert(*words, "--json") == 1
        out, err = capsys.readouterr()
        record = json.loads(out)
        assert record["settings"]["different"] == {"args: model.rotary_base": "10000.0 and 10001.0"}
        assert not record["verify"]["equal"]
        assert record["verify"]["different"] == {}
        assert "differs from the source in 1 settings of [model]; it was removed" in err
        assert convert(*words) == 1
        assert "args: model.rotary_base" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("form", ["mp-rank", "torch-dist"])
def test_logits_from_the_targets_own_args_are_compared(
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the reader makes another model of args whose fields are right."""
    from ascend_run.tools.convert import opening

    hugging_face(tmp_path / "hf")
    plain = opening.config_of_args

    def wrong(family: str, args: Mapping[str, Any], where: str) -> ModelConfig:
        return plain(family, {**args, "rotary_base": 10001.0}, where)

    monkeypatch.setattr(opening, "config_of_args", wrong)
    words = ("--to", form, "--verify", "logits", "--json", tmp_path / "hf", tmp_path / "out")
    assert convert(*words) == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["settings"]["different"] == {}
    assert record["verify"]["different"].keys() == {"logits, from its args"}
    assert "differs from the source in its logits; it was removed" in err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("form", ["hf", "ascend-run"])
def test_a_setting_that_changes_on_the_way_leaves_no_target(
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of formats that have no args, though the tensors are equal."""
    from ascend_run.tools.convert import conversion

    hugging_face(tmp_path / "hf")
    plain = conversion._write

    def wrong(target: Path, *arguments: Any) -> None:
        plain(target, *arguments)
        name = "config.json" if form == "hf" else "config.toml"
        text = (target / name).read_text()
        changed = re.sub(r"(rope_theta\W+|rotary_base = )10000.0", r"\g<1>10001.0", text)
        assert changed != text
        (target / name).write_text(changed)

    monkeypatch.setattr(conversion, "_write", wrong)
    words = ("--to", form, "--verify", "tensors", tmp_path / "hf", tmp_path / "out")
    assert convert(*words) == 1
    out, err = capsys.readouterr()
    assert "model.rotary_base" in out
    assert "10000.0 and 10001.0" in out
    assert "1 settings of [model]" in err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_settings_without_an_option_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config.toml beside the files has them; Megatron would not."""
    hugging_face(tmp_path / "hf")
    assert convert("--from-hf", tmp_path / "hf", tmp_path / "run") == 0
    file = tmp_path / "run" / "config.toml"
    text = re.sub(r"(?m)^(activation|softmax_scale) = .*\n", "", file.read_text())
    more = '[model]\nactivation = "gelu_tanh"\nsoftmax_scale = 0.5\n'
    file.write_text(text.replace("[model]\n", more))
    words = ("--to", "mp-rank", "--verify", "logits", tmp_path / "run")
    capsys.readouterr()
    assert convert(*words, tmp_path / "out") == 0
    out = capsys.readouterr().out
    line = "not in the target, whose default is another: args: model.activation"
    assert f"{line} ('gelu_tanh' and 'silu')" in out
    assert "softmax_scale" not in out  # the args have it under its own name
    assert convert(*words, "--json", tmp_path / "again") == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found["different"] == {}
    assert found["not_stated"].keys() == {"args: model.activation"}


def test_every_bit_counts() -> None:
    nan, zero = torch.tensor([torch.nan, 1.0]), torch.zeros(2)
    assert difference(nan, nan.clone()) is None
    found = difference(zero, -zero)
    assert found is not None
    assert (found.largest, found.text[:10]) == (0.0, "2 of 2 ele")
    found = difference(nan, zero)
    assert found is not None
    assert found.largest == torch.inf
    assert difference(zero, zero.double()) is not None
    assert difference(zero, torch.zeros(1)) is not None


def test_a_model_too_large_to_build_is_refused_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    hugging_face(tmp_path / "hf")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert convert("--to", "mp-rank", "--verify", "logits", tmp_path / "hf", tmp_path / "out") == 2
    assert "--verify tensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# -- copies -----------------------------------------------------------------------------------

NORM = "decoder.layers.0.input_layernorm.weight"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"
PROJ = "decoder.layers.1.self_attention.linear_proj.weight"


@pytest.fixture(params=["tp", "ep", "experts"])
def copies(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str, str]:
    """Files of which one has another value in its copy: folder, parameter, both files."""
    dense = request.param == "tp"
    hf = hugging_face(tmp_path / "hf", experts=not dense)
    if dense:
        Files(tp=2, stages=TWO_STAGES).write(tmp_path / "files", hf)
        where, name = ("mp_rank_00_001", "mp_rank_01_001"), NORM
        parameter = "decoder.layers.2.input_layernorm.weight"
    elif request.param == "ep":
        Files(ep=2, experts="one", padded=128).write(tmp_path / "files", hf)
        where, name, parameter = ("mp_rank_00_000", "mp_rank_00_001"), PROJ, PROJ
    else:
        Files(tp=2, expert_tp=1, experts="one").write(tmp_path / "files", hf)
        where, name = ("mp_rank_00", "mp_rank_01"), EXPERT
        parameter = "decoder.layers.0.mlp.experts.fc2"
    file = tmp_path / "files" / "iter_0000005" / where[1] / "model_optim_rng.pt"
    value = torch.load(file)["model"][name]
    value.view(-1)[3] += 0.5
    changed(file, name, value)
    return tmp_path / "files", parameter, *where


def test_copies_that_differ_are_refused_unless_the_first_is_wanted(
    copies: tuple[Path, str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, parameter, first, other = copies
    config = ("--config", str(tmp_path / "hf" / "config.json"))
    message = refused(capsys, files, *config)
    line = f"{parameter} differs between {first} and {other}: 1 of "
    assert line in message
    assert "elements differ, by at most 0.5" in message
    assert message.count("differs between") == 1
    words = ("--to", "hf", "--first-copy", *config, files, tmp_path / "out")
    assert convert(*words) == 0
    check_equal(stored(tmp_path / "out"), stored(tmp_path / "hf"))


def test_an_unreadable_source_is_not_reported_as_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ascend_run.tools.convert.formats.mp_rank_reading import StoredModel

    hf = hugging_face(tmp_path / "hf")
    Files(padded=128).write(tmp_path / "files", hf)

    def broken(self: StoredModel, name: str) -> Tensor:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(StoredModel, "read", broken)
    message = refused(capsys, tmp_path / "files", "--config", f"{tmp_path}/hf/config.json")
    assert f"{tmp_path}/files/iter_0000005 cannot be read: Input/output error" in message
    assert "embedding.word_embeddings.weight" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pipeline_model_parallel_layout", '"Et|tttL"'),
        ("num_layers_in_first_pipeline_stage", "1"),
        ("num_layers_in_last_pipeline_stage", "1"),
        ("account_for_embedding_in_pipeline_split", "true"),
        ("account_for_loss_in_pipeline_split", "true"),
    ],
)
def test_pipeline_stages_of_a_run_are_not_of_its_model(
    field: str, value: str, tmp_path: Path
) -> None:
    """Without them the model can be built on one rank, for its logits."""
    hugging_face(tmp_path / "hf")
    assert convert("--to", "ascend-run", tmp_path / "hf", tmp_path / "run") == 0
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    staged = text.replace("\n[model]", f"\n[model]\n{field} = {value}")
    file.write_text(staged)
    found = config_of_run(file, None).config.model
    file.write_text(text)
    assert found == config_of_run(file, None).config.model
    file.write_text(staged)
    verify = ("--verify", "logits") if field == "num_layers_in_first_pipeline_stage" else ()
    assert convert("--to", "ascend-run", *verify, tmp_path / "run", tmp_path / "out") == 0
