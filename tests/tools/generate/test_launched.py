"""The command on ranks that it starts. Each case starts processes, so the suite has one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.text.tokenizer import train_tokenizer
from tests.support.loopback import own_network as own_network
from tests.support.loopback import with_loopback_only
from tests.support.tiny_llama import write_llama

TEXT = "the quick brown fox jumps over a lazy dog"


def written(folder: Path) -> Path:
    tokenizer = train_tokenizer([TEXT] * 4, 300)
    size = tokenizer.vocab_size
    write_llama(folder, size, eos_token_id=size - 1, max_position_embeddings=40_000)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "ascend_run", "generate", str(folder), *words]


def ranks_of(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Return the ranks that compute: those that use a group of processes."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.cmdline()[-1:] == ["ascend_run.launch.rank"]:
            found[child.environ()["RANK"]] = child
    return found


@pytest.mark.exhaustive(by=lambda layout, how: {how} & {"offline"})
@pytest.mark.parametrize("how", ["lives", "offline", "dies"])
@pytest.mark.parametrize("layout", ["--tp", "--pp"])
def test_launched_ranks_answer_as_one_or_end_together(
    layout: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Also in a network that has nothing but loopback. A rank that dies ends all, with one
    message."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["the quick", "--dtype", "fp64", "--json", "--max-new-tokens"]
    folder = written(tmp_path)
    if how != "dies":
        words = [*words, "8"]
        launched = command(folder, *words, layout, "2")
        if how == "offline":
            request.getfixturevalue("own_network")
            launched = with_loopback_only(launched)
        assert run(["generate", str(folder), *words]) == 0
        one = json.loads(capsys.readouterr().out)
        done = subprocess.run(launched, capture_output=True, text=True, timeout=100)
        assert one == json.loads(done.stdout), done.stderr
        assert len(one["ids"]) == 8
        return
    process = subprocess.Popen(
        command(folder, *words, "30000", layout, "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(600):
            ranks = ranks_of(process)
            if len(ranks) == 2:
                break
            time.sleep(0.1)
        ranks["1"].kill()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (out, process.returncode) == ("", 1)
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    psutil.wait_procs(ranks.values(), timeout=20)
    assert not any(rank.is_running() for rank in ranks.values())
