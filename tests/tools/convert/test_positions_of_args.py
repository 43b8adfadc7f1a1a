"""ALiBi and log-n scaling in Megatron's formats: the args say them, or the model is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.megatron_args import make_args
from ascend_run.tools.convert.formats.mp_rank_files import open_mp_rank
from ascend_run.tools.convert.formats.safe_pickle import Inert, load_file
from ascend_run.tools.convert.formats.shard_layout import LayoutOptions
from ascend_run.tools.convert.formats.torch_dist import COMMON
from ascend_run.tools.convert.model_config import config_of_args, of_values
from tests.plugins.models.cases import BY_NAME
from tests.support.family_checks import stored

from .test_families import folder_of
from .test_mp_rank import check_equal, convert

WRITTEN = {
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.num_attention_heads": 2,
    "model.vocab_size": 16,
}


def args_of(family: str, **changes: object) -> Mapping[str, object]:
    config = of_values(family, WRITTEN, "the test").config
    return {**vars(make_args(config, LayoutOptions(), padded_rows=16)), **changes}


def stored_args(target: Path) -> Mapping[str, object]:
    folder = target / "iter_0000001"
    if not (folder / COMMON).is_file():
        return open_mp_rank(folder).args
    args = load_file(folder / COMMON)["args"]
    assert isinstance(args, Inert)
    return args.fields


@pytest.mark.parametrize("words", ["mp-rank --tp 2", "torch-dist"])
def test_alibi_returns_from_the_args_alone(words: str, tmp_path: Path) -> None:
    theirs = folder_of(BY_NAME["baichuan_13b"], tmp_path / "theirs")
    command = ("--to", *words.split(), "--verify", "logits", "--family", "baichuan_13b")
    assert convert(*command, theirs, tmp_path / "out") == 0
    assert stored_args(tmp_path / "out")["position_embedding_type"] == "alibi"
    (tmp_path / "out" / "config.toml").unlink()
    named = ("--to", "hf", "--family", "baichuan_13b")
    assert convert(*named, tmp_path / "out", tmp_path / "back") == 0
    check_equal(stored(tmp_path / "back"), stored(theirs))


@pytest.mark.parametrize("family", ["baichuan_13b", "baichuan2_13b", "bloom"])
def test_each_family_with_alibi_says_so_in_its_args(family: str) -> None:
    args = args_of(family)
    assert args["position_embedding_type"] == "alibi"
    assert config_of_args(family, args, "here").config.model.position_embedding_type == "none"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_other_families_say_their_own_positions(family: str) -> None:
    args = args_of(family)
    positions = of_values(family, WRITTEN, "the test").config.model.position_embedding_type
    assert args["position_embedding_type"] == positions
    read = config_of_args(family, args, "here").config.model
    assert read.position_embedding_type == positions


@pytest.mark.parametrize(
    ("family", "given", "problem"),
    [
        ("llama", "alibi", "='alibi', but the model family llama does not have ALiBi; name"),
        ("baichuan_13b", "none", "='none', but the model family baichuan_13b has ALiBi; name"),
        ("baichuan_13b", "rope", "='rope', but the model family baichuan_13b has ALiBi; name"),
        ("baichuan_13b", None, "=none, but the model family baichuan_13b has ALiBi; name"),
    ],
)
def test_args_of_other_positions_than_the_family_are_refused(
    family: str, given: str | None, problem: str
) -> None:
    args = args_of(family, position_embedding_type=given)
    with pytest.raises(CheckpointError) as caught:
        config_of_args(family, args, "here")
    assert f"here has args with position_embedding_type{problem}" in str(caught.value)


@pytest.mark.parametrize("kind", ["mrope", "relative", "yarn", "roped", "", None, 3])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_positions_that_are_not_known_are_refused(family: str, kind: object) -> None:
    args = args_of(family, position_embedding_type=kind)
    with pytest.raises(CheckpointError) as caught:
        config_of_args(family, args, "here")
    told = str(caught.value)
    if kind == "yarn" and family == "llama":
        assert "position_embedding_type is 'yarn': the numbers of its yarn are not in" in told
    else:
        assert f"here has args with position_embedding_type={show(kind)}, and only rope, " in told


def test_args_without_positions_have_those_of_the_family() -> None:
    args = {**args_of("gpt2")}
    del args["position_embedding_type"]
    found = config_of_args("gpt2", args, "here").config.model
    assert found.position_embedding_type == "learned_absolute"


@pytest.mark.parametrize("kind", [None, 0, 2])
def test_linear_alibi_is_read_whatever_computes_it(kind: int | None) -> None:
    args = args_of("baichuan_13b", alibi_fusion_attn_type=kind)
    assert config_of_args("baichuan_13b", args, "here").config.model.num_layers == 1


@pytest.mark.parametrize("kind", [1, 3, "2"])
def test_another_alibi_is_refused_by_its_value(kind: object) -> None:
    args = args_of("baichuan_13b", alibi_fusion_attn_type=kind)
    with pytest.raises(CheckpointError, match="a slope times the distance; name") as caught:
        config_of_args("baichuan_13b", args, "here")
    told = f"here has args with alibi_fusion_attn_type={show(kind)}, and model families have the "
    assert told in str(caught.value)
    positions = {"alibi_fusion_attn_type": kind, "position_embedding_type": "rope"}
    assert config_of_args("llama", args_of("llama", **positions), "here")  # of no effect there


def test_args_of_another_family_need_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that say no positions, as those of earlier did, are read with their config."""
    theirs = folder_of(BY_NAME["baichuan_13b"], tmp_path / "theirs")
    command = ("--to", "mp-rank", "--family", "baichuan_13b")
    assert convert(*command, theirs, tmp_path / "out") == 0
    (tmp_path / "out" / "config.toml").rename(tmp_path / "config.toml")
    refused, back = tmp_path / "refused", tmp_path / "back"
    assert convert("--to", "hf", "--family", "llama", tmp_path / "out", refused) == 2
    assert "the model family llama does not have ALiBi" in capsys.readouterr().err
    assert not refused.exists()
    named = ("--to", "hf", "--config", tmp_path / "config.toml")
    assert convert(*named, tmp_path / "out", back) == 0
    check_equal(stored(back), stored(theirs))


@pytest.mark.parametrize("words", ["mp-rank", "torch-dist"])
def test_log_n_scaling_is_refused_by_its_value(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = folder_of(BY_NAME["qwen"], tmp_path / "theirs")
    file = theirs / "config.json"
    fields = json.loads(file.read_text())
    assert convert("--to", words, theirs, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"model.log_n_scaling_length={fields['seq_length']} multiplies queries" in said
    assert not (tmp_path / "out").exists()
    file.write_text(json.dumps({**fields, "use_logn_attn": False}))
    assert convert("--to", words, "--verify", "logits", theirs, tmp_path / "out") == 0
    assert convert("--to", "hf", tmp_path / "out", tmp_path / "back") == 0
    check_equal(stored(tmp_path / "back"), stored(theirs))
