"""Runs of the train command: small, in process trees of their own, each with a timeout.

One of each kind, alone, on ranks of its own and under torchrun, is of new interpreters (``start``);
the others are forks of a process that has imported torch and Megatron (``forked_command``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.log.metrics import read_metrics
from ascend_run.core.run_files import PAGE_NAME, RUN_FILES
from tests.support.forked import OF_PRELOADED, OF_RANKS, Forked, forked_command

CONFIG = """
[model]
num_layers = 1
hidden_size = 32
num_attention_heads = 2
vocab_size = 300
[data]
train = ["data/train"]
tokenizer = "data/tokenizer.json"
seq_length = 32
[train]
train_iters = 2
global_batch_size = 2
precision = "fp32"
"""
TIMEOUT_SECONDS = 100
TWO = ("--config", "run.toml", "--nproc", "2", "optimizer.lr_decay_style=constant")
SAVED = (*TWO, "checkpoint.save_interval=1")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and the data it names."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "run.toml").write_text(CONFIG)
    text = folder / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"line {index} of a text\n" * (20 + index))
    words = ["preprocess", "--input", "text", "--format", "text", "--train-tokenizer", "300"]
    finish(forked_command(folder, *words, "--output-prefix", "data/train"))
    return folder


@pytest.fixture(scope="module")
def saved(workplace: Path) -> Path:
    """The folder of a run on two ranks that saved after each of its two steps; to be copied."""
    code, errors = finish(start(workplace, *SAVED, "run.output_dir=runs/saved"))
    assert code == 0, errors
    assert "Warning" not in errors
    return workplace / "runs/saved"


def start(
    folder: Path, *words: str, launcher: Sequence[str] = (sys.executable, "-m", "ascend_run")
) -> subprocess.Popen[str]:
    """A command in a new interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    return subprocess.Popen(
        [*launcher, *words],
        cwd=folder,
        env={**kept, **OF_PRELOADED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str] | Forked) -> tuple[int, str]:
    """Exit code and standard error; what is left after the timeout is killed."""
    try:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode is not None
    return process.returncode, errors


def readings(folder: Path, name: str) -> list[dict[str, object]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [reading for line in lines if "loss" in (reading := json.loads(line))]


def wait_for_steps(folder: Path, name: str, count: int = 1) -> None:
    path = folder / "runs" / name / "metrics.jsonl"
    for _ in range(10 * TIMEOUT_SECONDS):
        if path.exists() and path.read_text().count('"loss"') >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{count} steps were not made")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_gone(pids: Sequence[int]) -> bool:
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.timeout(400)  # two ranks import Megatron
def test_under_torchrun_the_run_folders_config_runs_identically(
    workplace: Path, saved: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher = [*torchrun, "2", "-m", "ascend_run"]
    words = ["--config", str(saved / "config.toml"), "run.output_dir=runs/torchrun"]
    code, errors = finish(start(workplace, *words, launcher=launcher))
    assert code == 0, errors
    first, again = readings(workplace, saved.name), readings(workplace, "torchrun")
    assert [reading["loss"] for reading in again] == [reading["loss"] for reading in first]


def test_what_cannot_run_is_reported_once_though_every_rank_finds_it(
    workplace: Path, saved: Path
) -> None:
    """The variables are those that torchrun sets for two ranks on one node."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none"}
    words = ["--config", str(saved / "config.toml"), "model.num_layers=0"]
    ranks = [
        forked_command(workplace, *words, variables={**job, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    ended = [finish(rank) for rank in ranks]
    assert all(code != 0 for code, _ in ended), ended
    assert "".join(errors for _, errors in ended).count("model.num_layers") == 1, ended


def test_every_file_of_a_run_folder_is_one_that_no_input_may_be(saved: Path) -> None:
    assert {path.name for path in saved.iterdir() if path.is_file()} == {*RUN_FILES, PAGE_NAME}


def test_it_runs_as_well_under_srun(workplace: Path) -> None:
    """The variables are those that srun of Slurm 22.05 sets for two tasks on one node."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    words = ["--config", "run.toml", "run.output_dir=runs/srun"]
    tasks = [
        forked_command(
            workplace, *words, variables={**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        )
        for rank in ("0", "1")
    ]
    for code, errors in [finish(task) for task in tasks]:
        assert code == 0, errors
    assert [reading["step"] for reading in readings(workplace, "srun")] == [1, 2]


def test_data_that_cannot_be_used_are_refused_before_any_rank_starts(workplace: Path) -> None:
    (workplace / "foreign.bin").write_bytes(b"\0" * 64)
    (workplace / "foreign.idx").write_bytes(b"no index of tokens at all")
    words = ["--config", "run.toml", "--nproc", "2", "data.train=foreign,data/missing"]
    code, errors = finish(start(workplace, *words, "run.output_dir=runs/foreign"))
    assert code == 2
    assert errors.startswith("error: the data of this run cannot be used:")
    assert "foreign" in errors
    assert "missing" in errors
    assert "rank" not in errors
    assert "Traceback" not in errors
    assert not (workplace / "runs" / "foreign").exists()


def test_a_late_row_that_cannot_be_used_is_refused_before_the_first_step(workplace: Path) -> None:
    """Found where all text is read: by the rank that encodes it."""
    rows = [*(f'{{"text": "text {n}"}}' for n in range(150)), '{"body": "no text"}']
    (workplace / "late.jsonl").write_text("\n".join(rows))
    words = ["--config", "run.toml", "data.train=late.jsonl", "run.output_dir=runs/late"]
    code, errors = finish(forked_command(workplace, *words))
    assert code == 2
    assert "error: this run cannot start:\n  pretrain: late.jsonl:151: expected text" in errors
    assert "Traceback" not in errors
    assert readings(workplace, "late") == []


def test_a_failed_save_ends_the_run_and_keeps_earlier_checkpoints(
    workplace: Path, saved: Path
) -> None:
    shutil.copytree(saved, workplace / "runs/full")
    words = ["--config", "run.toml", "optimizer.lr_decay_style=constant"]
    words += ["run.output_dir=runs/full", "checkpoint.save_interval=2"]
    code, errors = finish(
        forked_command(workplace, *words, "train.train_iters=4", file_bytes=100_000)
    )
    assert code == 2, errors
    assert errors.count("error:") == 1
    assert "File too large (EFBIG)" in errors
    assert "Traceback" not in errors
    checkpoints = workplace / "runs/full/checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_00000001", "step_00000002"]
    FileStore(checkpoints).verify(2)
    history = read_metrics(workplace / "runs/full/metrics.jsonl")
    assert history.events[-1]["event"] == "failure"
    assert "cannot save checkpoint" in history.events[-1]["error"]
    assert [record["step"] for record in history.records] == [1, 2, 3, 4]


def test_a_full_disk_under_the_metrics_is_one_message(workplace: Path) -> None:
    folder = workplace / "runs/no-metrics"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    code, errors = finish(
        forked_command(workplace, "--config", "run.toml", "run.output_dir=runs/no-metrics")
    )
    assert code == 2, errors
    assert errors.count("error:") == 1
    assert "metrics.jsonl:\n  No space left on device; free space" in errors
    assert "Traceback" not in errors


def test_killed_ranks_resume_from_their_checkpoint_and_ctrl_c_ends_them(
    workplace: Path, saved: Path
) -> None:
    """No process is left, and no traceback is shown."""
    words = [*SAVED, "run.output_dir=runs/on", f"checkpoint.load={saved / 'checkpoints'}"]
    words += ["train.train_iters=1000000"]
    process = forked_command(workplace, *words, "--max-restarts", "1", ranks=4)
    wait_for_steps(workplace, "on")
    while not list((workplace / "runs/on/checkpoints").glob("step_*")):
        time.sleep(0.05)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    resumed: list[int] = []
    for _ in range(10 * TIMEOUT_SECONDS):
        events = read_metrics(workplace / "runs/on/metrics.jsonl").events
        resumed = [event["step"] for event in events if event["event"] == "resume"]
        if len(resumed) == 2:
            break
        time.sleep(0.1)
    ranks = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, errors = finish(process)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert len(ranks) == 2
    assert all_gone(ranks)
    assert resumed[0] == 2
    assert resumed[1] > 2
    failures = [e["error"] for e in events if e["event"] == "failure"]
    assert len(failures) >= 1
    assert "rank 1 was killed by SIGKILL" in failures[-1]


def test_one_rank_makes_the_steps_of_two_until_it_is_terminated(
    workplace: Path, saved: Path
) -> None:
    words = ["--config", "run.toml", "optimizer.lr_decay_style=constant"]
    process = start(workplace, *words, "train.train_iters=1000000", "run.output_dir=runs/alone")
    wait_for_steps(workplace, "alone", count=2)
    ranks = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == 143, errors
    assert "Warning" not in errors
    assert "Traceback" not in errors
    assert all_gone(ranks)
    alone, two = readings(workplace, "alone")[:2], readings(workplace, saved.name)
    assert [reading["step"] for reading in alone] == [1, 2]
    for one, other in zip(alone, two, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
