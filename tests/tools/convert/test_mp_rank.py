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
from tests.plugins.models.cases import FAMILIES
from tests.support.family_checks import stored

from .megatron_files import EXPERTS, FFN, GROUPS, HEADS, HIDDEN, Files, hugging_face

TWO_STAGES = (((0, 1),), ((2, 3),))
INTERLEAVED = (((0,), (2,)), ((1,), (3,)))
ENGINE, DUALPIPEV = "--transformer-impl transformer_engine", "--schedules-method dualpipev"
CASES: dict[str, tuple[Files, str]] = {
    "one": (Files(padded=128), ""),
    "tp": (Files(tp=2), "--tp 2"),
    "shared-key-value-heads": (Files(tp=4, padded=512), "--tp 4"),
    "tp-pp-engine": (
        Files(tp=2, stages=TWO_STAGES, engine=True),
        f"--tp 2 --pp 2 {ENGINE}",
    ),
    "tied": (Files(tp=2, tied=True), "--tp 2"),
    "tied-pp": (Files(tp=2, stages=TWO_STAGES, tied=True), "--tp 2 --pp 2"),
    "vpp": (Files(stages=INTERLEAVED, padded=128), "--pp 2 --vpp 2"),
    "layer-list": (
        Files(stages=(((0,),), ((1, 2, 3),)), padded=128),
        "--pp 2 --num-layer-list 1,3",
    ),
    "empty-layers": (
        Files(stages=(((None,), (1,), (3,)), ((0,), (2,), (None,))), padded=128),
        "--pp 2 --vpp 3 --noop-layers 0,5",
    ),
    "dualpipev": (
        Files(
            stages=(((None, 0), (3, None)), ((1, None), (None, 2))),
            dualpipev=True,
            tied=True,
            padded=128,
        ),
        f"--pp 2 {DUALPIPEV} --noop-layers 0,3,4,7",
    ),
    "vocabulary": (Files(tp=2, padded=40), "--tp 2 --make-vocab-size-divisible-by 5"),
    "ep": (Files(ep=2, experts="one", padded=128), "--ep 2"),
    "tp-pp-ep": (
        Files(tp=2, ep=2, experts="one", stages=TWO_STAGES),
        "--tp 2 --pp 2 --ep 2",
    ),
    "ep-engine": (
        Files(tp=2, ep=2, experts="numbered", engine=True),
        f"--tp 2 --ep 2 {ENGINE} --moe-grouped-gemm",
    ),
    "engine-one-by-one": (
        Files(tp=2, ep=2, experts="one", engine=True),
        f"--tp 2 --ep 2 {ENGINE}",
    ),
    "engine-legacy-grouped": (
        Files(ep=2, experts="grouped", engine=True, padded=128),
        f"--ep 2 {ENGINE} --moe-grouped-gemm --moe-use-legacy-grouped-gemm",
    ),
    "grouped": (
        Files(tp=2, ep=2, experts="grouped"),
        "--tp 2 --ep 2 --moe-grouped-gemm",
    ),
    "expert-tp": (
        Files(tp=2, ep=4, expert_tp=1, experts="one", pairs=((0, 0), (1, 1), (0, 2), (1, 3))),
        "--tp 2 --ep 4 --expert-tp 1",
    ),
    "grouped-expert-tp": (
        Files(tp=2, ep=2, expert_tp=1, experts="grouped", pairs=((0, 0), (1, 1))),
        "--tp 2 --ep 2 --expert-tp 1 --moe-grouped-gemm",
    ),
    "tp-extend-ep": (
        Files(tp=2, ep=2, extended=True, experts="grouped"),
        "--tp 2 --ep 2 --moe-tp-extend-ep --moe-grouped-gemm",
    ),
    "latent": (
        Files(tp=2, stages=TWO_STAGES, experts="one", latent="queries"),
        "--tp 2 --pp 2",
    ),
    "latent-engine": (
        Files(tp=2, ep=2, experts="numbered", engine=True, latent="queries"),
        f"--tp 2 --ep 2 {ENGINE} --moe-grouped-gemm",
    ),
    "latent-plain-queries": (
        Files(tp=2, experts="one", engine=True, latent="plain"),
        f"--tp 2 {ENGINE}",
    ),
    "mindspeed-latent": (
        Files(tp=2, experts="grouped", latent="plain", mindspeed="concat"),
        "--tp 2 --moe-grouped-gemm --mla-qkv-concat",
    ),
    "mindspeed-latent-split": (
        Files(
            tp=2,
            ep=2,
            stages=(((0,), (3,)), ((1,), (2,))),
            dualpipev=True,
            experts="grouped",
            extended=True,
            latent="queries",
            mindspeed="split",
        ),
        f"--tp 2 --pp 2 --ep 2 {DUALPIPEV} --moe-grouped-gemm --moe-tp-extend-ep --mla-mm-split",
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
    experts = bool(case.experts)
    return folder, hugging_face(folder, experts=experts, tied=case.tied, latent=case.latent)


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
    extended = ["--read-moe-tp-extend-ep"] if case.extended else []
    words = ("--to", "hf", *extended, "--config", folder / "config.json")
    assert convert(*words, tmp_path / "megatron", tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)


@pytest.mark.exhaustive(by=lambda kind: [w for w in CASES[kind][1].split() if w.startswith("--")])
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


def test_latent_attention_of_earlier_mindspeed(tmp_path: Path) -> None:
    """Its names of the up projections and of the norm of keys and values."""
    case = Files(tp=2, experts="grouped", latent="queries", mindspeed="concat")
    folder, hf = hf_folder(case, tmp_path)
    case.write(tmp_path / "megatron", hf)
    renamed = {"q_up_proj": "qb", "kv_up_proj": "kvb", ".kv_layernorm": ".k_layernorm"}
    for file in tmp_path.glob("megatron/*/*/*.pt"):
        state = torch.load(file)
        for old, new in renamed.items():
            state["model"] = {n.replace(old, new): t for n, t in state["model"].items()}
        torch.save(state, file)
    words = ("--to", "hf", "--config", folder / "config.json")
    assert convert(*words, tmp_path / "megatron", tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)


def test_a_half_of_a_projection_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Files(padded=128, experts="grouped", latent="queries", mindspeed="split")
    _, hf = hf_folder(case, tmp_path)
    case.write(tmp_path / "megatron", hf)
    (file,) = tmp_path.glob("megatron/*/*/*.pt")
    changed(file, "decoder.layers.1.self_attention.linear_v.weight", None)
    words = ("--to", "hf", "--config", tmp_path / "hf" / "config.json")
    assert convert(*words, tmp_path / "megatron", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "layers.1.self_attention.linear_v.weight is missing, a half" in message


def test_the_args_alone_give_the_config(tmp_path: Path) -> None:
    kinds = ("empty-layers", "tp-extend-ep", "dualpipev", "mindspeed-latent-split", "latent-engine")
    for number, kind in enumerate(kinds):
        root = tmp_path / str(number)
        root.mkdir()
        case, words = CASES[kind]
        folder, hf = hf_folder(case, root)
        assert convert("--to", "mp-rank", *words.split(), folder, root / "megatron") == 0
        (root / "megatron" / "config.toml").unlink()
        family = "deepseek_v2" if case.latent else "mixtral" if case.experts else "llama"
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


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations allocate, while they live.

    With ``loaded`` also of those that ``torch.load`` sets, which may lie in a mapped file.
    """

    def __init__(self, *, loaded: bool = False) -> None:
        super().__init__()
        self.loaded = loaded
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        given = before if self.loaded else _storages((args, kwargs))
        for tensor in tree_leaves(result):
            if _real(tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                storage = tensor.untyped_storage()
                self.live[key] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def _storages(values: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tree_leaves(values) if _real(tensor)}


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_one_parameter_of_torch_dist_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """With its copy in the other form; where it is read, also with the file's chunk."""
    folder, hf = hf_folder(CASES["tp-pp-ep"][0], tmp_path)
    largest = EXPERTS * 2 * FFN * HIDDEN * 4
    with PeakBytes() as writing:
        assert convert("--to", "torch-dist", folder, tmp_path / "a") == 0
    with PeakBytes(loaded=True) as reading:
        assert convert("--to", "hf", tmp_path / "a", tmp_path / "b") == 0
    assert largest <= writing.peak <= 2.5 * largest
    assert 2 * largest <= reading.peak <= 3.5 * largest
    check_equal(stored(tmp_path / "b"), hf)


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


def test_an_unknown_version(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_file(megatron)
    torch.save({**torch.load(file), "checkpoint_version": 1.5}, file)
    assert "checkpoint_version 1.5; expected 0, 1.0, 2.0 or 3.0" in refused(capsys, megatron)
    torch.save({**torch.load(file), "checkpoint_version": 2.0}, file)
    assert "different checkpoint_version: 2.0, 3.0" in refused(capsys, megatron)


def test_a_tracker_that_names_nothing(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "iter_0000009 is missing" in refused(capsys, megatron, "--step", "9")
    (megatron / "latest_checkpointed_iteration.txt").write_text("../../etc")
    assert "is neither an iteration nor 'release'" in refused(capsys, megatron)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pp 3", "4 layer slots are not divisible by pp=3"),
        ("--pp 2 --num-layer-list 1,2", "--num-layer-list 1,2 has 3 layer slots; the model has 4"),
        ("--noop-layers 9", "--noop-layers 9: 4 layers and 1 empty ones are slots 0 to 4"),
        ("--schedules-method dualpipev --pp 3", "4 layer slots are not divisible by pp=3 * vpp=2"),
        ("--schedules-method dualpipev --vpp 4", "has 2 chunks per stage, not --vpp 4"),
        ("--mla-mm-split", "are for models with multi-latent attention"),
        ("--moe-use-legacy-grouped-gemm", "needs --moe-grouped-gemm"),
        ("--tp 3", "2 key-value groups are neither split nor shared evenly by tp=3"),
        ("--ep 2", "are for models with experts"),
        ("--num-layer-list 1,x", "'1,x' is not a list of numbers"),
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
    ["--tp 2", "--num-layer-list 2,2", "--moe-tp-extend-ep", "--transformer-impl local"],
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
    ("form", "family", "message"),
    [
        ("mp-rank", "bloom", "embedding.layernorm.weight does not"),
        ("torch-dist", "bloom", "embedding.layernorm.weight does not"),
        ("mp-rank-legacy", "deepseek_v2", "megatron.legacy has no multi-latent attention"),
        ("mp-rank", "deepseek_v3", "latent_layernorm_epsilon=1e-06 with model.layernorm_epsilon="),
        ("torch-dist", "deepseek_v3", "latent_layernorm_epsilon=1e-06 with model.layernorm_eps"),
        ("mp-rank", "minicpm3", "model.residual_multiplier="),
        ("mp-rank-legacy", "qwen2_moe", "shared_experts.linear_fc1.weight does not"),
    ],
)
def test_a_model_that_megatron_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, family: str, message: str
) -> None:
    found = next(one for one in FAMILIES if one.name == family)
    found.model(**[*found.variants.values()][-1]).save_pretrained(tmp_path / "hf")
    assert convert("--to", form, tmp_path / "hf", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
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
