"""Ranks that cannot meet where their starter says: one message, and what must be so."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ascend_run.core.train import groups
from ascend_run.plugin_api import ConfigError, Layout


@pytest.fixture
def busy_port() -> Iterator[int]:
    """One on which something else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_one_message(
    monkeypatch: pytest.MonkeyPatch, busy_port: int
) -> None:
    refusal = refusal_at(monkeypatch, "127.0.0.1", str(busy_port), rank=0)
    assert refusal.headline == (
        f"rank 0 of 2 cannot meet the others at MASTER_ADDR=127.0.0.1, MASTER_PORT={busy_port}"
    )
    assert "a port that is free there" in refusal.problems[1]


def test_a_port_at_which_nobody_answers_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = refusal_at(monkeypatch, "127.0.0.1", "9", rank=1)
    assert refusal.headline.startswith("rank 1 of 2 cannot meet the others")


def test_a_host_that_is_not_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = refusal_at(monkeypatch, "no-such-host.invalid", "29555", rank=1)
    assert "MASTER_ADDR=no-such-host.invalid" in refusal.headline
    assert "\n" not in "".join(refusal.problems)


def test_a_port_that_is_no_number_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MASTER_PORT=http" in refusal_at(monkeypatch, "127.0.0.1", "http", rank=1).headline


def refusal_at(monkeypatch: pytest.MonkeyPatch, address: str, port: str, rank: int) -> ConfigError:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    layout = Layout(world_size=2, rank=rank)
    with pytest.raises(ConfigError) as refused:
        groups._init_default_group(layout, "gloo", datetime.timedelta(seconds=2))
    assert not dist.is_initialized()
    return refused.value


def test_ranks_that_are_started_again_do_not_read_what_the_first_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    for variable in ("ASCEND_RUN_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        for attempt in ("0", "1"):
            monkeypatch.setenv(variable, attempt)
            own = groups.store_of_attempt(store)
            assert not own.check(["address"])
            own.set("address", attempt)
        monkeypatch.delenv(variable)
        store = dist.HashStore()
