"""What the train command decides before any rank runs; true runs are in test_train_runs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ascend_run.entrypoints import train
from ascend_run.launch import agent
from ascend_run.launch.options import LaunchOptions
from ascend_run.plugin_api import AscendRunError, CommOptions, ConfigError, DataError, RankFailure
from ascend_run.prepare.handed_over import HandedOver
from ascend_run.prepare.prepare import prepare
from tests.support.command_line import imported_by, top
from tests.support.installed import Install, offer

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest

STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")

NEEDS_VARIABLE = """
from ascend_run.plugin_api import Manifest, hookimpl

class Plugin:
    manifest = Manifest(name="tuned", summary="needs a variable")

    @hookimpl
    def ascend_environment(self):
        return {"TUNED_BUFFERS": "8"}
"""

SIZED = """
from ascend_run.plugin_api import CommOptions, Manifest, hookimpl

class Plugin:
    manifest = Manifest(name="sized", summary="size the buffer of a communicator")

    @hookimpl
    def ascend_comm_options(self, config, layout, communication):
        return {"cp": CommOptions(buffer_mb=7, why="seven")}
"""
OPTIONS = {"cp": CommOptions(buffer_mb=7, why="seven")}

TRAIN = train._train
"""The function itself, which ``started`` replaces."""
ESTIMATE = "ascend_run.tools.plan.cost_model.estimate"
STAGE_COST = "_rank_cost"
"""Every estimate calls it once a pipeline stage, by whichever name the estimate is imported."""


class Started:
    """What would have run: trainings in this process, and launches of ranks."""

    def __init__(self) -> None:
        self.trained: list[dict[str, str]] = []
        self.launched: list[tuple[str, Any, LaunchOptions]] = []
        self.error: BaseException | None = None
        self.reported = 0
        self.hosts_first_rank = True
        self.failures: list[tuple[str, bool]] = []

    def train(self, prepared: Any) -> None:
        self.trained.append(dict(os.environ))
        if self.error is not None:
            raise self.error

    def report(self, prepared: Any) -> None:
        self.reported += 1

    def launch(self, target: str, request: Any, options: LaunchOptions, on_failure: Any) -> bool:
        self.launched.append((target, request, options))
        for failure in self.failures:
            on_failure(*failure)
        return self.hosts_first_rank


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Nothing starts, and the environment is put back afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in (*STARTERS, "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCHELASTIC_ERROR_FILE"):
        os.environ.pop(name, None)
    started = Started()
    monkeypatch.setattr(train, "check_run_data", lambda prepared: None)  # "corpus" is only a name
    monkeypatch.setattr(train, "_report", started.report)
    monkeypatch.setattr(train, "_train", started.train)
    monkeypatch.setattr(agent, "launch_ranks", started.launch)
    return started


@pytest.fixture
def asked(started: Started, monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """What core would have been asked to train."""
    requests: list[RunRequest] = []
    monkeypatch.setattr(train, "_train", TRAIN)
    monkeypatch.setattr("ascend_run.core.run.run_training", requests.append)
    return requests


def run(*words: str | Path) -> Any:
    """Invoke the command; errors come through."""
    return CliRunner().invoke(
        train.command, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
    )


def refusal(*words: str | Path) -> AscendRunError:
    with pytest.raises(AscendRunError) as refused:
        run(*words)
    return refused.value


ONE_RANK = ("parallel.context_parallel_size=1", "run.nproc=1")


def test_help_imports_little() -> None:
    code, modules = imported_by(["train", "--help"])
    assert code == 0
    assert {top(module) for module in modules} <= {"ascend_run", "click"}


def test_neither_a_refusal_nor_the_printed_config_imports_torch(tmp_path: Path) -> None:
    assert "torch" not in imported_by(["train", "--nproc", "2"])[1]
    file = tmp_path / "run.toml"
    model = "num_layers = 1\nhidden_size = 8\nnum_attention_heads = 1\nvocab_size = 9\n"
    file.write_text(f'[model]\n{model}[data]\ntrain = ["x"]\n')
    code, modules = imported_by(["--config", str(file), "--print-config"])
    assert (code, "torch" in modules) == (0, False)


def test_alone_it_trains_in_this_process_without_the_variables_of_a_rank(
    started: Started, file: Path
) -> None:
    run("--config", file, *ONE_RANK)
    (environment,) = started.trained
    assert not started.launched
    assert not set(STARTERS) & environment.keys()
    assert environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_a_choice_of_the_user_in_the_environment_stays(started: Started, file: Path) -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    run("--config", file, *ONE_RANK)
    assert started.trained[0]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


@pytest.mark.filterwarnings("ignore")  # Megatron's own, where it is imported
@pytest.mark.parametrize(
    "words", [("--nproc", "2"), ("run.nproc=2",), ("--nproc", "2", "run.nproc=1")], ids=str
)
def test_ranks_are_started_with_what_they_need_to_prepare_alike(
    started: Started, file: Path, words: tuple[str, ...]
) -> None:
    run("--config", file, "--enable", "relay", *words, "run.seed=5", "--max-restarts", "3")
    ((target, message, options),) = started.launched
    assert not started.trained
    assert target == "ascend_run.entrypoints.train:run_rank"
    assert options == LaunchOptions(nproc=2, max_restarts=3)
    train.run_rank(json.loads(json.dumps(message)))
    assert started.trained
    received = HandedOver(**json.loads(json.dumps(message))).run_request()
    assert (received.config.run.seed, received.config.run.nproc) == (5, 2)
    assert [plugin.manifest.name for plugin in received.plugins] == message["plugins"]
    assert json.loads(received.plan_json)["cost"]["stages"]


@pytest.mark.filterwarnings("ignore")  # Megatron's own, where it is imported
def test_a_rank_receives_its_run_and_prepares_nothing(
    started: Started,
    asked: list[RunRequest],
    install: Install,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It resolves no plugins, plans nothing and computes no costs; its config is the launcher's, as
    are the options of its communicators, which follow from the costs."""
    offer(install, "sized", SIZED)
    run("--config", file, "--nproc", "2", "--enable", "relay,sized")
    message = json.loads(json.dumps(started.launched[0][1]))
    prepared = prepare(file, ["run.nproc=2"], enable=["relay", "sized"], world_size=2)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a rank does not prepare")

    for module, name in (
        ("ascend_run.prepare.prepare", "resolve"),
        ("ascend_run.prepare.prepare", "build_plan"),
        ("ascend_run.prepare.prepare", "compatibility_problems"),
        (ESTIMATE, STAGE_COST),
    ):
        monkeypatch.setattr(f"{module}.{name}", refuse)
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    train.run_rank(message)
    (received,) = asked
    assert received.comm_options == OPTIONS
    assert received.config == prepared.config
    assert received.lock == prepared.lock
    assert received.config_toml == prepared.run_request().config_toml


@pytest.mark.filterwarnings("ignore")  # Megatron's own, where it is imported
@pytest.mark.parametrize("rank", [None, "0", "1"], ids=["alone", "rank 0", "rank 1"])
def test_a_process_that_prepares_itself_computes_costs_once(
    asked: list[RunRequest],
    install: Install,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: str | None,
) -> None:
    """Also where a plugin derives options of communicators from them; ranks of torchrun each do."""
    offer(install, "sized", SIZED)
    estimated: list[object] = []
    inner = getattr(importlib.import_module(ESTIMATE), STAGE_COST)

    def stage_cost(*args: object) -> object:
        estimated.append(args)
        return inner(*args)

    monkeypatch.setattr(f"{ESTIMATE}.{STAGE_COST}", stage_cost)
    if rank is not None:
        os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
        os.environ.update(MASTER_ADDR="h", MASTER_PORT="1")
    run("--config", file, "--enable", "relay,sized", *(ONE_RANK if rank is None else ()))
    (received,) = asked
    assert received.comm_options == OPTIONS
    assert len(estimated) == 1  # there is one stage


def test_cores_are_shared_where_several_ranks_compute_on_them(started: Started, file: Path) -> None:
    run("--config", file, "--nproc", "2")
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


@pytest.fixture
def two_nodes(tmp_path: Path) -> tuple[str, ...]:
    """Options of one of two nodes."""
    key = tmp_path / "rdzv.key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef" * 4)
    return ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--rdzv-key-file", str(key))


def test_several_nodes_need_a_place_to_meet(
    started: Started, file: Path, two_nodes: tuple[str, ...]
) -> None:
    run("--config", file, *two_nodes, "--node-rank", "1")
    ((_, _, options),) = started.launched
    assert options == LaunchOptions(
        nproc=1, nnodes=2, rdzv_endpoint="h:1", rdzv_key_file=two_nodes[-1], node_rank=1
    )
    assert "needs --rdzv-endpoint" in str(refusal("--config", file, "--nnodes", "2"))


@pytest.mark.parametrize("hosts_first_rank", [True, False])
def test_the_node_of_the_first_rank_reports_the_result(
    started: Started, file: Path, hosts_first_rank: bool, two_nodes: tuple[str, ...]
) -> None:
    started.hosts_first_rank = hosts_first_rank
    run("--config", file, *two_nodes)
    assert started.reported == hosts_first_rank


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_another_launcher_reports_the_result(
    started: Started, file: Path, rank: int
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    run("--config", file)
    assert started.reported == (rank == 0)


def test_the_first_failure_is_written_to_the_metrics_of_the_run_folder(
    started: Started, file: Path, tmp_path: Path
) -> None:
    started.failures = [("rank 1: ValueError: no", False), ("rank 0: Connection closed", True)]
    folder = tmp_path / "run"
    words = ("--config", file, "--nproc", "2", f"run.output_dir={folder}")
    run(*words)
    assert not folder.exists()
    folder.mkdir()
    run(*words)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["error"] for event in events] == ["rank 1: ValueError: no"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nproc", "3"), "3 ranks are not a multiple of the parallel sizes"),
        (("--nproc", "2", "data.seq_length=63"), "data.seq_length=63 cannot be split"),
        (("--nproc", "2", "train.global_batch_size=0"), "train.global_batch_size=0 must be > 0"),
        (("--nproc", "2", "--enable", "relayy"), "relayy"),
        (("run.nproc=two",), "run.nproc='two': expected a whole number"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_any_rank_starts(
    started: Started, file: Path, words: tuple[str, ...], message: str
) -> None:
    error = refusal("--config", file, *words)
    assert message in str(error)
    assert error.exit_code == 2
    assert not started.trained
    assert not started.launched


def test_a_rank_of_torchrun_trains_as_that_rank(started: Started, file: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    os.environ.update(place, MASTER_ADDR="h", MASTER_PORT="1")
    run("--config", file)
    assert place.items() <= started.trained[0].items()
    assert not started.launched


def test_a_launched_rank_plans_nothing_and_the_first_of_a_node_reports(
    started: Started, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks that torchrun started, only rank 0 plans; what cannot run is reported in full by
    one, and by the other in one line, later, with the same exit code."""
    calls: list[str] = []
    for module, name in (
        ("ascend_run.prepare.prepare", "build_plan"),
        (ESTIMATE, STAGE_COST),
    ):
        inner = getattr(importlib.import_module(module), name)
        called = partial(lambda name, f, *a: calls.append(name) or f(*a), name, inner)
        monkeypatch.setattr(f"{module}.{name}", called)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    found: dict[str, tuple[list[str], str, list[float]]] = {}
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
        os.environ.update(MASTER_ADDR="h", MASTER_PORT="1")
        calls.clear()
        run("--config", file)
        planned = [*calls]
        waits.clear()
        error = refusal("--config", file, "model.num_layers=0", "train.train_iters=-1")
        assert error.exit_code == 2
        found[rank] = (planned, str(error), [*waits])
    assert len(started.trained) == 2
    (planned, full, waited), (unplanned, line, waited_too) = found["0"], found["1"]
    assert (planned, waited) == (["build_plan", STAGE_COST], [])
    assert "model.num_layers" in full
    assert "train.train_iters" in full
    assert (unplanned, waited_too) == ([], [5.0])
    assert line == f"rank 1: {full.partition(':')[0]}"


def test_a_task_of_srun_is_given_the_words_of_torch(started: Started, file: Path) -> None:
    os.environ.update(SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_LOCALID="0")
    run("--config", file)
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert expected.items() <= started.trained[0].items()


def test_one_task_a_node_may_start_the_ranks_of_its_node(started: Started, file: Path) -> None:
    os.environ.update(SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_LOCALID="0")
    run("--config", file, "--nproc", "2")
    assert started.launched
    assert not started.trained


def test_ranks_inside_of_a_rank_are_refused(started: Started, file: Path) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    assert "this process is already rank 0 of 2" in str(refusal("--config", file, "--nproc", "2"))


def test_a_refusal_of_a_rank_names_it_and_is_left_for_its_starter(
    started: Started, file: Path, tmp_path: Path
) -> None:
    record = tmp_path / "error.json"
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(record)
    started.error = DataError("the dataset is corrupt")
    error = refusal("--config", file)
    assert isinstance(error, RankFailure)
    assert (str(error), error.exit_code) == ("rank 1: the dataset is corrupt", 2)
    assert json.loads(record.read_text())["message"]["message"] == "the dataset is corrupt"


def test_a_bug_of_a_rank_is_left_for_its_starter_and_keeps_its_traceback(
    started: Started, file: Path, tmp_path: Path
) -> None:
    record = tmp_path / "error.json"
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(record)
    started.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run("--config", file)
    assert json.loads(record.read_text())["message"]["message"] == "ZeroDivisionError: a bug"


def test_variables_of_plugins_are_set_before_ranks_start(
    started: Started, install: Install, file: Path
) -> None:
    offer(install, "tuned", NEEDS_VARIABLE)
    run("--config", file, "--enable", "relay,tuned", "--nproc", "2")
    assert os.environ["TUNED_BUFFERS"] == "8"


def test_a_variable_that_contradicts_a_plugin_is_refused(
    started: Started, install: Install, file: Path
) -> None:
    offer(install, "tuned", NEEDS_VARIABLE)
    os.environ["TUNED_BUFFERS"] = "4"
    error = refusal("--config", file, "--enable", "relay,tuned", "--nproc", "2")
    assert isinstance(error, ConfigError)
    assert error.problems == ("TUNED_BUFFERS='4': an enabled plugin needs '8'; set it to that",)
    assert not started.launched


NEEDS_HASHES = NEEDS_VARIABLE.replace("TUNED_BUFFERS", "PYTHONHASHSEED")


@pytest.mark.parametrize("in_time", [True, False])
def test_one_rank_gets_a_new_process_if_a_variable_is_set_too_late(
    started: Started, install: Install, file: Path, in_time: bool
) -> None:
    offer(install, "tuned", NEEDS_HASHES)
    os.environ.pop("PYTHONHASHSEED", None)
    if in_time:
        os.environ["PYTHONHASHSEED"] = "8"
    run("--config", file, "--enable", "relay,tuned", *ONE_RANK)
    assert (len(started.trained), len(started.launched)) == ((1, 0) if in_time else (0, 1))
    assert os.environ["PYTHONHASHSEED"] == "8"


def test_a_variable_set_too_late_under_another_launcher_warns_once(
    started: Started, install: Install, file: Path
) -> None:
    offer(install, "tuned", NEEDS_HASHES)
    told = []
    for rank in ("0", "1"):
        os.environ.pop("PYTHONHASHSEED", None)
        os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
        told.append(run("--config", file, "--enable", "relay,tuned").stderr)
    assert "PYTHONHASHSEED=8" in told[0]
    assert told[1] == ""
    assert len(started.trained) == 2


def test_the_printed_config_reproduces_the_run_and_gives_origins(
    started: Started, file: Path, tmp_path: Path
) -> None:
    words = ("--enable", "relay", "--nproc", "2", "run.seed=7")
    printed = run("--config", file, *words, "--print-config").output
    assert not started.launched
    assert 'enable = ["relay"]  # command line' in printed
    assert "seed = 7  # command line" in printed
    assert "num_layers = 4  # run.toml:" in printed
    again = tmp_path / "printed.toml"
    again.write_text(printed)
    first = prepare(file, ["run.seed=7", "run.nproc=2"], enable=["relay"], world_size=2)
    assert prepare(again, world_size=2).config == first.config


def test_the_command_lines_plugins_stand_in_place_of_the_files(
    started: Started, file: Path
) -> None:
    printed = run("--config", file, "--enable", "", *ONE_RANK, "--print-config").output
    assert "enable = []  # command line" in printed


def test_sigterm_unwinds_a_run_in_this_process(
    started: Started, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwound = []

    def train_until_terminated(prepared: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            unwound.append(True)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        monkeypatch.setattr(train, "_train", train_until_terminated)
        ended = run("--config", file, *ONE_RANK)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code == 143
    assert unwound == [True]
