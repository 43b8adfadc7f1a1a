from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_run.launch.options import LaunchOptions
from ascend_run.launch.rendezvous_key import RendezvousKey
from ascend_run.plugin_api import ConfigError


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "rdzv.key"
    path.touch(mode=0o600)
    path.write_text("0123456789abcdef" * 4 + "\n")
    return path


def test_the_world_is_every_rank_of_every_node(key_file: Path) -> None:
    meeting = {"rdzv_endpoint": "[::1]:1234", "rdzv_key_file": key_file}
    options = LaunchOptions(nproc=4, nnodes=3, node_rank=2, **meeting)
    assert options.world_size == 12
    assert options.endpoint == ("::1", 1234)


def test_nodes_with_one_key_file_agree_and_others_do_not(key_file: Path) -> None:
    key, same = RendezvousKey.read(key_file), RendezvousKey.read(key_file)
    assert key.run_id() == same.run_id()
    assert same.open(key.seal(b"state")) == b"state"
    other = RendezvousKey.random()
    assert other.run_id() != key.run_id()
    for forged in (b"", b"state", other.seal(b"state"), key.seal(b"state")[:-1] + b"f"):
        with pytest.raises(ValueError, match="HMAC"):
            key.open(forged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "No such file or directory; make one with"),
        (lambda path: path.write_text("short"), "has 5 characters, 5 of them different; a key has"),
        (lambda path: path.write_text("a" * 64), "64 characters, 1 of them different; a key has"),
        (lambda path: path.chmod(0o644), "has mode 644 and owner .*, so other users can read"),
    ],
    ids=["missing", "short", "one letter", "readable by others"],
)
def test_a_key_file_that_keeps_no_secret_is_refused(
    key_file: Path, change: Callable[[Path], object], message: str
) -> None:
    change(key_file)
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(nnodes=2, rdzv_endpoint="host:1", rdzv_key_file=key_file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2}, "--nnodes 2 needs --rdzv-key-file FILE, a secret that every node"),
        ({"rdzv_key_file": "k"}, "--rdzv-key-file k needs --nnodes above 1"),
        ({"rdzv_endpoint": "host:1"}, "--rdzv-endpoint host:1 needs --nnodes above 1"),
        ({"nnodes": 2, "rdzv_endpoint": "host"}, "--rdzv-endpoint host: expected HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "h:0"}, "h:0: expected HOST:PORT, a port from 1 to 65535"),
        ({"nnodes": 2, "rdzv_endpoint": "h:65536"}, "h:65536: expected HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "http://h:1"}, "http://h:1: expected HOST:PORT"),
        (
            {"nnodes": 2, "rdzv_endpoint": "host:1", "node_rank": 2},
            "--node-rank 2 must be from 0 to 1",
        ),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(**options)
