"""Checkpoints of Megatron and MindSpeed, against files that were written from the layout rules."""

from __future__ import annotations

import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.megatron_args import model_values
from tests.plugins.models.cases import FAMILIES
from tests.support.family_checks import stored

from .megatron_files import EXPERTS, FFN, GROUPS, HEADS, HIDDEN, Files, hugging_face

TWO_STAGES = (((0, 1),), ((2, 3),))
INTERLEAVED = (((0,), (2,)), ((1,), (3,)))
CASES: dict[str, tuple[Files, str]] = {
    "one": (Files(padded=128), ""),
    "tp": (Files(tp=2), "--tp 2"),
    "shared-key-value-heads": (Files(tp=4, padded=512), "--tp 4"),
    "tp-pp-engine": (
        Files(tp=2, stages=TWO_STAGES, engine=True),
        "--tp 2 --pp 2 --transformer-engine",
    ),
    "tied": (Files(tp=2, tied=True), "--tp 2"),
    "tied-pp": (Files(tp=2, stages=TWO_STAGES, tied=True), "--tp 2 --pp 2"),
    "vpp": (Files(stages=INTERLEAVED, padded=128), "--pp 2 --vpp 2"),
    "layer-list": (Files(stages=(((0,),), ((1, 2, 3),)), padded=128), "--pp 2 --layer-list 1,3"),
    "empty-layers": (
        Files(stages=(((None,), (1,), (3,)), ((0,), (2,), (None,))), padded=128),
        "--pp 2 --vpp 3 --empty-layers 0,5",
    ),
    "vocabulary": (Files(tp=2, padded=40), "--tp 2 --make-vocab-size-divisible-by 5"),
    "ep": (Files(ep=2, experts="one", padded=128), "--ep 2"),
    "tp-pp-ep": (
        Files(tp=2, ep=2, experts="one", stages=TWO_STAGES),
        "--tp 2 --pp 2 --ep 2",
    ),
    "ep-engine": (
        Files(tp=2, ep=2, experts="numbered", engine=True),
        "--tp 2 --ep 2 --transformer-engine",
    ),
    "grouped": (
        Files(tp=2, ep=2, experts="grouped"),
        "--tp 2 --ep 2 --grouped-matmul-layout",
    ),
    "expert-tp": (
        Files(tp=2, ep=4, expert_tp=1, experts="one", pairs=((0, 0), (1, 1), (0, 2), (1, 3))),
        "--tp 2 --ep 4 --expert-tp 1",
    ),
    "grouped-expert-tp": (
        Files(tp=2, ep=2, expert_tp=1, experts="grouped", pairs=((0, 0), (1, 1))),
        "--tp 2 --ep 2 --expert-tp 1 --grouped-matmul-layout",
    ),
    "tp-extend-ep": (
        Files(tp=2, ep=2, extended=True, experts="grouped"),
        "--tp 2 --ep 2 --tp-extend-ep --grouped-matmul-layout",
    ),
}


def convert(*words: str | Path) -> int:
    return run(["convert", *map(str, words)])


def check_equal(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def hf_folder(case: Files, root: Path) -> tuple[Path, dict[str, Tensor]]:
    folder = root / "hf"
    return folder, hugging_face(folder, experts=bool(case.experts), tied=case.tied)


def rank_files(folder: Path) -> dict[str, Any]:
    """Load every rank's file by its folder's name, as Megatron does."""
    return {
        path.parent.name: torch.load(path, weights_only=False)
        for path in sorted(folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    }


@pytest.mark.parametrize("kind", CASES)
def test_files_written_from_the_rules_are_read(kind: str, tmp_path: Path) -> None:
    """Without args, and with the config of Hugging Face."""
    case = CASES[kind][0]
    folder, hf = hf_folder(case, tmp_path)
    case.write(tmp_path / "megatron", hf)
    extended = ["--read-tp-extend-ep"] if case.extended else []
    words = ("--to", "hf", *extended, "--config", folder / "config.json")
    assert convert(*words, tmp_path / "megatron", tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)


@pytest.mark.parametrize("kind", CASES)
def test_written_files_are_those_of_the_rules(kind: str, tmp_path: Path) -> None:
    """And they are read back bit for bit, with what lies beside them alone."""
    case, words = CASES[kind]
    folder, hf = hf_folder(case, tmp_path)
    written, out = tmp_path / "megatron", tmp_path / "out"
    assert convert("--to", "mp-rank", *words.split(), folder, written) == 0
    case.write(tmp_path / "rules", hf)
    got, want = rank_files(written), rank_files(tmp_path / "rules")
    assert got.keys() == want.keys()
    for name, state in want.items():
        chunks = [key for key in state if key.startswith("model")]
        assert [key for key in got[name] if key.startswith("model")] == chunks
        for chunk in chunks:
            check_equal(got[name][chunk], state[chunk])
        assert got[name]["checkpoint_version"] == 3.0
    tracker = (written / "latest_checkpointed_iteration.txt").read_text()
    assert (written / f"iter_{int(tracker):07d}").is_dir()
    assert convert("--to-hf", written, out) == 0
    check_equal(stored(out), hf)


def test_the_args_alone_give_the_config(tmp_path: Path) -> None:
    for number, kind in enumerate(("empty-layers", "tp-extend-ep")):
        root = tmp_path / str(number)
        root.mkdir()
        case, words = CASES[kind]
        folder, hf = hf_folder(case, root)
        assert convert("--to", "mp-rank", *words.split(), folder, root / "megatron") == 0
        (root / "megatron" / "config.toml").unlink()
        family = "mixtral" if case.experts else "llama"
        words = f"--to hf --family {family}"
        assert convert(*words.split(), root / "megatron", root / "out") == 0
        check_equal(stored(root / "out"), hf)


def test_classes_that_others_allow_stay_records(tmp_path: Path) -> None:
    """Megatron allows argparse.Namespace and others in the whole process."""
    hf = hugging_face(tmp_path / "hf")
    assert convert("--to", "mp-rank", tmp_path / "hf", tmp_path / "megatron") == 0
    (tmp_path / "megatron" / "config.toml").unlink()
    with torch.serialization.safe_globals([Namespace]):
        words = ("--to", "hf", "--family", "llama")
        assert convert(*words, tmp_path / "megatron", tmp_path / "out") == 0
        assert Namespace in torch.serialization.get_safe_globals()
    check_equal(stored(tmp_path / "out"), hf)


def test_one_layout_becomes_another_and_our_checkpoint(tmp_path: Path) -> None:
    case = CASES["tp-pp-ep"][0]
    folder, hf = hf_folder(case, tmp_path)
    case.write(tmp_path / "a", hf)
    config = ("--config", folder / "config.json")
    assert convert("--to", "mp-rank", "--ep", "4", *config, tmp_path / "a", tmp_path / "b") == 0
    assert len(rank_files(tmp_path / "b")) == 4
    assert convert("--to", "ascend-run", tmp_path / "b", tmp_path / "run") == 0
    words = ["--to", "mp-rank", "--tp", "2", "--pp", "2", "--ep", "2"]
    assert convert(*words, tmp_path / "run", tmp_path / "c") == 0
    got, want = rank_files(tmp_path / "c"), rank_files(tmp_path / "a")
    assert got.keys() == want.keys()
    for name, state in want.items():
        check_equal(got[name]["model"], state["model"])


def legacy_state(hf: Mapping[str, Tensor], norms: tuple[str, str, str]) -> dict[str, Any]:
    """A tied model as megatron.legacy nests it, on one rank."""
    plain = Files(padded=128).ranks({**hf, "lm_head.weight": hf["model.embed_tokens.weight"]})
    chunk = plain[0, 0, 0][0]
    renamed = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "input_layernorm": norms[0],
        "pre_mlp_layernorm": norms[1],
        "final_layernorm": norms[2],
    }
    encoder = {}
    for name, tensor in chunk.items():
        if name.startswith("decoder."):
            for old, new in renamed.items():
                name = name.replace(old, new)
            encoder[name.removeprefix("decoder.")] = tensor
    words = {"weight": chunk["embedding.word_embeddings.weight"]}
    return {"language_model": {"embedding": {"word_embeddings": words}, "encoder": encoder}}


@pytest.mark.parametrize(
    "norms",
    [
        ("input_norm", "post_attention_norm", "final_norm"),
        ("input_layernorm", "post_attention_layernorm", "final_layernorm"),
    ],
    ids=["new", "old"],
)
def test_legacy_names(norms: tuple[str, str, str], tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    hf = hugging_face(folder, tied=True)
    rank = tmp_path / "legacy" / "mp_rank_00"
    rank.mkdir(parents=True)
    want = {"checkpoint_version": 3.0, "model": legacy_state(hf, norms)}
    torch.save(want, rank / "model_optim_rng.pt")
    config = ("--config", folder / "config.json")
    assert convert("--to", "hf", *config, rank.parent, tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)
    assert convert("--to", "mp-rank-legacy", folder, tmp_path / "again") == 0
    assert convert("--to", "hf", tmp_path / "again", tmp_path / "hf-again") == 0
    check_equal(stored(tmp_path / "hf-again"), hf)
    if norms[0] == "input_norm":
        (state,) = rank_files(tmp_path / "again").values()
        got, model = state["model"]["language_model"], want["model"]["language_model"]
        check_equal(got["encoder"], model["encoder"])
        check_equal(got["embedding"]["word_embeddings"], model["embedding"]["word_embeddings"])


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations allocate, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _real(t)}
        for tensor in tree_leaves(result):
            if _real(tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                storage = tensor.untyped_storage()
                self.live[key] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def _real(value: object) -> bool:
    return type(value) is Tensor and value.device.type == "cpu"


def test_one_parameter_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """With its shards: twice the largest parameter, of a model of many times its size."""
    case = CASES["tp-pp-ep"][0]
    folder, hf = hf_folder(case, tmp_path)
    largest = EXPERTS * 2 * FFN * HIDDEN * 4
    total = sum(tensor.nbytes for tensor in hf.values())
    assert total > 6 * largest
    with PeakBytes() as counted:
        words = ["--to", "mp-rank", "--tp", "2", "--pp", "2", "--ep", "2"]
        assert convert(*words, folder, tmp_path / "a") == 0
        assert convert("--to", "hf", tmp_path / "a", tmp_path / "b") == 0
        assert convert("--to", "ascend-run", tmp_path / "a", tmp_path / "c") == 0
        assert convert("--to", "hf", tmp_path / "c", tmp_path / "d") == 0
    assert largest <= counted.peak <= 2.5 * largest
    check_equal(stored(tmp_path / "d"), hf)


# -- bad input --------------------------------------------------------------------------------


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A checkpoint of four ranks, with the config beside it."""
    case = CASES["tied-pp"][0]
    folder, hf = hf_folder(case, tmp_path)
    written = case.write(tmp_path / "megatron", hf)
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    return written


def refused(capsys: pytest.CaptureFixture[str], source: Path, *words: str) -> str:
    """The one message of a refusal, with exit code 2 and nothing written."""
    capsys.readouterr()
    out = source.parent / "out"
    before = {path for path in source.parent.rglob("*") if source not in path.parents}
    config = ("--config", source.parent / "config.json")
    assert convert("--to", "hf", *config, *words, source, out) == 2
    assert {path for path in source.parent.rglob("*") if source not in path.parents} == before
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def rank_file(megatron: Path, rank: str = "mp_rank_01_001") -> Path:
    return megatron / "iter_0000005" / rank / "model_optim_rng.pt"


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/owned",)


@pytest.mark.parametrize("at", ["args", "model"])
def test_a_hostile_file_runs_nothing(
    at: str, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rank_file(megatron)
    state = torch.load(file)
    torch.save({**state, at: Hostile(megatron.parent)}, file)
    message = refused(capsys, megatron)
    assert f"{file} is refused: it asks for posix.system" in message
    assert not (megatron.parent / "owned").exists()


def test_a_plain_pickle_runs_nothing(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_file(megatron)
    file.write_bytes(pickle.dumps(Hostile(megatron.parent)))
    assert str(file) in refused(capsys, megatron)
    assert not (megatron.parent / "owned").exists()


@pytest.mark.parametrize("keep", [0, 100, -2000])
def test_a_truncated_file(keep: int, megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_file(megatron)
    file.write_bytes(file.read_bytes()[:keep])
    message = refused(capsys, megatron)
    assert f"{file} is truncated, corrupt, or not a file of torch.save" in message


def test_a_missing_rank(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_file(megatron).unlink()
    assert "mp_rank_01_001 has no model_optim_rng.pt" in refused(capsys, megatron)
    shutil.rmtree(rank_file(megatron).parent)
    message = refused(capsys, megatron)
    assert "tensor-parallel rank 1, pipeline stage 1, expert-parallel rank 0 is missing" in message


def changed(file: Path, name: str, tensor: Tensor | None) -> None:
    state = torch.load(file)
    if tensor is None:
        del state["model"][name]
    else:
        state["model"][name] = tensor
    torch.save(state, file)


def test_every_wrong_tensor_is_listed(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = rank_file(megatron, "mp_rank_00_000"), rank_file(megatron, "mp_rank_01_000")
    rows = (HEADS + 2 * GROUPS) * 4 // 2
    for file in (first, second):
        changed(file, "decoder.layers.0.self_attention.linear_qkv.weight", torch.ones(rows, 3))
    changed(second, "decoder.layers.1.mlp.linear_fc1.weight", torch.ones(5, HIDDEN))
    changed(second, "decoder.layers.1.mlp.linear_fc2.weight", None)
    for file in (first, second):
        changed(file, "decoder.layers.1.mlp.unknown.weight", torch.ones(2))
    message = refused(capsys, megatron)
    assert f"layers.0.self_attention.linear_qkv.weight: [{2 * rows}, 3], expected" in message
    assert "layers.1.mlp.linear_fc1.weight: its shards differ in shape or dtype" in message
    assert "layers.1.mlp.linear_fc2.weight: missing on tensor-parallel rank 1" in message
    assert "layers.1.mlp.unknown.weight: no parameter of a GPTModel" in message


def test_a_tied_copy_that_differs(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_file(megatron, "mp_rank_00_001")  # the other has padding rows only
    changed(file, "output_layer.weight", torch.ones(128, HIDDEN))
    assert "differs from embedding.word_embeddings.weight" in refused(capsys, megatron)


def test_a_layer_too_few(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tp in (0, 1):
        file = rank_file(megatron, f"mp_rank_{tp:02d}_001")
        state = torch.load(file)
        state["model"] = {n: t for n, t in state["model"].items() if "layers.1." not in n}
        torch.save(state, file)
    assert "decoder.layers.3.input_layernorm.weight is missing" in refused(capsys, megatron)


def test_an_old_order_of_queries(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_file(megatron)
    torch.save({**torch.load(file), "checkpoint_version": 1.0}, file)
    assert "checkpoint_version 1.0" in refused(capsys, megatron)


def test_a_tracker_that_names_nothing(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "iter_0000009 is missing" in refused(capsys, megatron, "--step", "9")
    (megatron / "latest_checkpointed_iteration.txt").write_text("../../etc")
    assert "is neither an iteration nor 'release'" in refused(capsys, megatron)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pp 3", "4 layer slots are not divisible by pp=3"),
        ("--pp 2 --layer-list 1,2", "--layer-list 1,2 has 3 layer slots; the model has 4"),
        ("--empty-layers 9", "--empty-layers 9: 4 layers and 1 empty ones are slots 0 to 4"),
        ("--tp 3", "2 key-value groups are neither split nor shared evenly by tp=3"),
        ("--ep 2", "are for models with experts"),
        ("--layer-list 1,x", "'1,x' is not a list of numbers"),
    ],
)
def test_a_layout_that_does_not_divide_the_model(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hugging_face(tmp_path / "hf")
    assert convert("--to", "mp-rank", *words.split(), tmp_path / "hf", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "words",
    ["--tp 2", "--expert-tp 1", "--layer-list 2,2", "--tp-extend-ep", "--transformer-engine"],
)
def test_layout_options_are_for_mp_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert convert("--to", "hf", *words.split(), tmp_path, tmp_path / "out") == 2
    assert f"{words.split()[0]}: no effect with --to hf" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["mp-rank", "torch-dist"])
def test_the_step_of_a_named_iteration_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    hugging_face(tmp_path / "hf")
    assert convert("--to", form, tmp_path / "hf", tmp_path / "made") == 0
    folder = tmp_path / "made/iter_0000001"
    assert convert("--to", "hf", "--step", "5", folder, tmp_path / "out") == 2
    assert f"{folder} is not the folder of iteration 5" in capsys.readouterr().err
    assert convert("--to", "hf", "--step", "1", folder, tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rope_scaling", True),
        ("moe_router_score_function", "sigmoid"),
        ("squared_relu", True),
        ("moe_router_topk_scaling_factor", 2.5),
    ],
)
def test_args_that_change_the_model_need_a_config(name: str, value: object) -> None:
    """Values as Megatron stores them; with its defaults they give the model."""
    args = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    defaults = {"use_rope_scaling": False, "moe_router_score_function": "softmax"}
    assert model_values({**args, **defaults}, "here")["model.num_layers"] == 2
    with pytest.raises(CheckpointError, match="here has options that change the model") as refusal:
        model_values({**args, **defaults, name: value}, "here")
    assert [*refusal.value.problems] == [f"{name} is {show(value)}"]


@pytest.mark.parametrize("form", ["mp-rank", "mp-rank-legacy", "torch-dist"])
@pytest.mark.parametrize("family", ["deepseek_v2", "bloom"])
def test_a_model_that_is_not_proven_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, family: str
) -> None:
    """Latent attention; a parameter that Megatron's GPTModel does not have."""
    found = next(one for one in FAMILIES if one.name == family)
    found.model(**next(iter(found.variants.values()))).save_pretrained(tmp_path / "hf")
    assert convert("--to", form, tmp_path / "hf", tmp_path / "out") == 2
    message = capsys.readouterr().err
    expected = {
        "deepseek_v2": "multi-latent attention",
        "bloom": "embedding.layernorm.weight does not",
    }
    assert expected[family] in message
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    hugging_face(tmp_path / "hf")
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert convert("--to", "mp-rank", tmp_path / "hf", tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
