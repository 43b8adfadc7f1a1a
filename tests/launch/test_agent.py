"""The launcher with stub ranks: each failure in its own process tree, with a timeout."""

from __future__ import annotations

import base64
import datetime
import errno
import hashlib
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ascend_run.launch import agent
from tests.support import launch_driver
from tests.support.forked import Forked

REPOSITORY = Path(__file__).parents[2]
FRAME = "Traceback (most recent call last):"


def start(folder: Path, function: str, **options: Any) -> Forked:
    """The driver with 2 ranks, in a session of its own."""
    request = {"folder": str(folder), "text": "$local_rank $$ 'x' \u00e9"}
    chosen = {"nproc": 2, "grace_seconds": 1, **options}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return Forked(
        launch_driver.main,
        [function, json.dumps(request), json.dumps(chosen)],
        {**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        folder,
    )


def finish(process: Forked) -> tuple[int, str]:
    """Exit code and standard error; what is left after the timeout is killed."""
    code, errors, _ = finish_with_notes(process)
    return code, errors


def finish_with_notes(process: Forked) -> tuple[int, str, list[Any]]:
    """The same, and what the launcher passed on: failures, and whether rank 0 was here."""
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    notes = [json.loads(line) for line in output.splitlines() if line.startswith(("[", "t", "f"))]
    assert process.returncode is not None
    return process.returncode, errors, notes


def wait_for(folder: Path, *names: str) -> None:
    for _ in range(600):
        if all((folder / name).exists() and (folder / name).read_text() for name in names):
            return
        time.sleep(0.05)
    raise AssertionError(f"the ranks did not come up: {sorted(os.listdir(folder))}")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where ranks leave their process ids; at the end every one of them must be gone."""
    yield tmp_path
    pids = {path.name: int(path.read_text()) for path in tmp_path.glob("*.pid")}
    for _ in range(100):
        left = {name: pid for name, pid in pids.items() if is_running(pid)}
        if not left:
            return
        time.sleep(0.05)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"left behind: {left}")


def test_each_rank_is_given_its_place_and_the_request(folder: Path) -> None:
    code, errors = finish(start(folder, "write_environment"))
    assert (code, errors) == (0, "")
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["RANK"] for one in seen] == [one["LOCAL_RANK"] for one in seen] == ["0", "1"]
    for one in seen:
        assert one["WORLD_SIZE"] == "2"
        assert one["MASTER_ADDR"]
        assert one["MASTER_PORT"]
        assert one["text"] == "$local_rank $$ 'x' \u00e9"


def test_a_rank_that_fails_is_named_and_a_rank_that_hangs_is_ended(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_on_1"))
    lines = errors.splitlines()
    assert (code, lines[0]) == (1, f"error: rank 1: {FRAME}")
    assert lines[-1] == "ValueError: the bug of rank 1"
    assert errors.count(FRAME) == 1


def test_torchs_agent_is_given_what_older_torch_takes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def older(
        self: Any,
        spec: Any,
        logs_specs: Any,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
    ) -> None:  # torch 2.11's
        given.update(spec=spec, logs_specs=logs_specs, start_method=start_method)

    monkeypatch.setattr(agent.LocalElasticAgent, "__init__", older)
    own = {"grace_seconds": 1, "on_failure": lambda text, lost: None}
    agent._RankAgent(spec="spec", logs_specs="logs", **own)
    assert given == {"spec": "spec", "logs_specs": "logs", "start_method": "spawn"}


def test_a_refusal_on_a_rank_has_no_traceback_and_the_users_exit_code(folder: Path) -> None:
    code, errors = finish(start(folder, "refuse_on_1"))
    assert code == 2
    assert errors == (
        "error: rank 1: the dataset is corrupt:\n  file x: truncated\n  file y: foreign\n"
    )


@pytest.mark.exhaustive(by=lambda function: ())
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exit_3_on_1", "rank 1 ended with exit code 3"),
        ("vanish_on_1", "rank 1 ended with exit code 5"),
        ("die_on_1", "rank 1 was killed by SIGKILL, as the system does when memory runs out"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(
    folder: Path, function: str, message: str
) -> None:
    """The other rank may notice before it is ended, and is then reported as a consequence."""
    code, errors = finish(start(folder, function))
    first, *consequences = errors.splitlines()
    assert (code, first) == (1, f"error: {message}")
    assert consequences in ([], ["rank 0 then lost its connection to another rank"])


def test_a_slow_first_failure_stands_before_its_consequences(folder: Path) -> None:
    code, errors, notes = finish_with_notes(start(folder, "fail_slowly_on_1"))
    lines = errors.splitlines()
    assert (code, lines[0]) == (1, f"error: rank 1: {FRAME}")
    assert lines[-2:] == [
        "ValueError: the first failure",
        "rank 0 then lost its connection to another rank",
    ]
    assert notes == [["rank 1: ValueError: the first failure", False]]


def test_a_rank_that_hangs_after_its_failure_does_not_hold_up_the_run(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_and_never_end_on_1"))
    assert code == 1
    assert errors.splitlines()[-1] == "ValueError: the reported failure"


def test_a_target_that_cannot_be_imported_fails_in_its_start(folder: Path) -> None:
    code, errors = finish(start(folder, "no_such_function"))
    assert code == 1
    assert "has no attribute 'no_such_function'" in errors


@pytest.mark.exhaustive(by=lambda number: ())
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_every_rank_and_what_it_started(
    folder: Path, number: signal.Signals, exit_code: int
) -> None:
    process = start(folder, "hang_deaf")
    wait_for(folder, "rank0.pid", "rank1.pid", "child0.pid", "child1.pid")
    process.send_signal(number)
    code, errors, notes = finish_with_notes(process)
    assert code == exit_code
    assert "Traceback" not in errors
    assert notes == [[f"ended by {number.name}", False]]


def test_a_second_signal_does_not_leave_ranks_behind(folder: Path) -> None:
    process = start(folder, "hang_deaf")
    wait_for(folder, "rank0.pid", "rank1.pid")
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert finish(process)[0] == 130


def test_ranks_end_with_a_launcher_that_is_killed(folder: Path) -> None:
    process = start(folder, "hang")
    wait_for(folder, "rank0.pid", "rank1.pid")
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL


def test_a_rank_killed_from_outside_is_named_and_nothing_is_left(folder: Path) -> None:
    process = start(folder, "hang")
    wait_for(folder, "rank0.pid", "rank1.pid")
    os.kill(int((folder / "rank1.pid").read_text()), signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    assert errors.startswith("error: rank 1 was killed by SIGKILL")


def test_ranks_are_started_again_as_often_as_allowed(folder: Path) -> None:
    code, errors, notes = finish_with_notes(start(folder, "fail_once", max_restarts=2))
    assert code == 0
    assert notes == [["rank 1: ValueError: the bug of rank 1", False], True]
    assert "ValueError: the bug of rank 1" in errors
    assert errors.splitlines()[-1] == "starting all ranks again (1 of 2)"
    seen = json.loads((folder / "rank1.json").read_text())
    assert seen["ASCEND_RUN_ATTEMPT"] == "1"


@pytest.mark.exhaustive(by=lambda node_ranks: ())
@pytest.mark.parametrize("node_ranks", [(0, 1), (None, None)], ids=["static", "as they come"])
def test_two_nodes_meet_at_an_endpoint_and_one_has_the_first_rank(
    folder: Path, node_ranks: tuple[int | None, int | None]
) -> None:
    options = two_nodes(folder)
    nodes = [start(folder, "write_environment", node_rank=n, **options) for n in node_ranks]
    ends = [finish_with_notes(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    told = [notes for _, _, notes in ends]
    assert told == [[True], [False]] or (node_ranks[0] is None and told == [[False], [True]])
    for rank in (0, 1):
        seen = json.loads((folder / f"rank{rank}.json").read_text())
        assert (seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == ("2", "0")


def two_nodes(folder: Path, name: str = "key", host: str = "127.0.0.1") -> dict[str, Any]:
    """Options of two nodes on this machine.

    Args:
        host: An address of this machine.
    """
    key = folder / name
    key.touch(mode=0o600)
    key.write_text(hashlib.sha256(name.encode()).hexdigest())
    endpoint = free_endpoint(host)
    return {"nproc": 1, "nnodes": 2, "rdzv_endpoint": endpoint, "rdzv_key_file": str(key)}


def free_endpoint(host: str) -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def test_ctrl_c_ends_a_node_that_waits_for_another(folder: Path) -> None:
    """Not only once it has come, or the time to wait for it is over."""
    options = two_nodes(folder)
    node = start(folder, "write_environment", node_rank=0, **options)
    wait_for_store(options["rdzv_endpoint"])
    time.sleep(0.5)  # into the wait
    node.send_signal(signal.SIGINT)
    assert finish(node) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("node_rank", "message"),
    [(0, "after 1 s these of 3 nodes have not come: 1, 2"), (1, "no store at {} within 1 s")],
)
def test_nodes_that_do_not_come_are_named(folder: Path, node_rank: int, message: str) -> None:
    options = {**two_nodes(folder), "nnodes": 3, "join_seconds": 1, "node_rank": node_rank}
    code, errors = finish(start(folder, "write_environment", **options))
    assert code == 1
    assert message.format(options["rdzv_endpoint"]) in errors


@pytest.mark.exhaustive(by=lambda over: [] if over == "two nodes" else [over])
@pytest.mark.parametrize("over", ["one machine", "two nodes", "a network"])
def test_a_run_listens_on_one_address_only(folder: Path, over: str) -> None:
    """Launchers and ranks, with every group connected; another address is refused."""
    host = outside_address() if over == "a network" else "127.0.0.1"
    nodes = [{}] if over == "one machine" else [two_nodes(folder, host=host)] * 2
    processes = [start(folder, "meet_and_hang", **options) for options in nodes]
    wait_for(folder, "rank0.pid", "rank1.pid")
    listening = [address for process in processes for address in listeners(process.pid)]
    others = {"127.0.0.2", *own_addresses()} - {host}
    endpoints = {(address, port) for address in others for _, port in listening}
    refused = [is_refused(*endpoint) for endpoint in endpoints - strangers(processes)]
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert [finish(process)[0] for process in processes] == [130] * len(processes)
    assert len(listening) >= 3  # a store and a rank's gloo each, or the test sees nothing
    assert {address for address, _ in listening} == {host}
    assert refused
    assert all(refused)


def listeners(pid: int) -> list[tuple[str, int]]:
    """Address and port of each listening TCP socket of a process and its children."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in family(pid)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def strangers(processes: Sequence[Forked]) -> set[tuple[str, int]]:
    """Where processes of other tests listen: a port is free on each address of its own."""
    ours = {one.pid for process in processes for one in family(process.pid)}
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid not in ours
    }


def outside_address() -> str:
    """One of this machine that is not loopback's first; where it has no network, another there."""
    others = [address for address in own_addresses() if not address.startswith("127.")]
    return others[0] if others else "127.0.0.2"


def own_addresses() -> list[str]:
    interfaces = psutil.net_if_addrs().values()
    return [one.address for some in interfaces for one in some if one.family == socket.AF_INET]


def is_refused(address: str, port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(5)
        return stranger.connect_ex((address, port)) == errno.ECONNREFUSED


def test_what_a_stranger_writes_to_the_store_is_not_unpickled(folder: Path) -> None:
    """The first node waits for the second; someone else puts a pickle in place of its state."""
    options = two_nodes(folder)
    node = start(folder, "write_environment", **options)
    planted = overwrite_every_key(options["rdzv_endpoint"], Touch(str(folder / "canary")))
    code, errors = finish(node)
    assert planted
    assert code == 1
    assert "something else has written to the rendezvous store" in errors
    assert not (folder / "canary").exists()


def wait_for_store(endpoint: str) -> None:
    host, _, port = endpoint.partition(":")
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at {endpoint}")


class Touch:
    """Unpickling it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def overwrite_every_key(endpoint: str, value: object) -> list[str]:
    """Connect as anyone can and replace what is there, once the rendezvous has begun."""
    from torch.distributed import TCPStore

    host, _, port = endpoint.partition(":")
    store = TCPStore(host, int(port), timeout=datetime.timedelta(seconds=30))
    payload = base64.b64encode(pickle.dumps(value))
    for _ in range(600):
        if states := [key for key in store.list_keys() if "torch.rendezvous." in key]:
            for key in states:
                store.set(key.lstrip("/"), payload)
            return states
        time.sleep(0.05)
    return []


@pytest.mark.parametrize("node_ranks", [(0, 1), (None, None)], ids=["static", "as they come"])
def test_a_node_with_another_key_is_refused(
    folder: Path, node_ranks: tuple[int | None, int | None]
) -> None:
    options = two_nodes(folder)
    first = start(folder, "write_environment", node_rank=node_ranks[0], **options)
    wait_for_store(options["rdzv_endpoint"])
    other = {**two_nodes(folder, "another key"), "rdzv_endpoint": options["rdzv_endpoint"]}
    code, errors = finish(start(folder, "write_environment", node_rank=node_ranks[1], **other))
    first.kill()  # it waits for a node with its own key
    finish(first)
    assert code == 1
    assert "the nodes have different keys: --rdzv-key-file must be the same" in errors
