"""``ascend-run diff``: the command, on folders made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.fingerprint.record import FILE_NAME
from ascend_run.entrypoints.cli import run
from ascend_run.tools.pages.step_differences import PARTS
from tests.entrypoints.test_completion import completions
from tests.tools.report.run_folders import CONFIG, PLAN, write_run

DOCS = Path(__file__).parents[3] / "docs/diff.md"


def entry(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "fingerprint": f"{step:016x}",
        "loss": 4.5 - step / 8 if step else None,
        "grad_norm": 0.5 if step else None,
        "parameters": f"{step + 99:016x}",
        "consumed_samples": 8 * step,
        "batch": f"{step + 7:016x}" if step else None,
        **fields,
    }


def folder(
    path: Path,
    last: int = 6,
    changed: Mapping[int, Mapping[str, Any]] | None = None,
    first: int = 0,
    environment: Any = None,
    **parts: Any,
) -> Path:
    """A run folder with entries from ``first`` to ``last``, some of them changed."""
    write_run(path, lines=[{"event": "start"}], **parts)
    lines = [entry(step, **(changed or {}).get(step, {})) for step in range(first, last + 1)]
    text = "".join(f"{json.dumps(line)}\n" for line in [{"event": "start", "format": 1}, *lines])
    (path / FILE_NAME).write_text(text)
    (path / "environment.json").write_text(json.dumps(environment or {"format": 1}))
    return path


def result(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    run(["diff", *map(str, paths), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def causes(found: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    return [(d["kind"], d["name"], d["values"]) for d in found["differences"]]


def test_the_text_says_where_in_what_and_how_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {4: {"parameters": "0" * 16}, 5: {"loss": 4.0, "parameters": "1" * 16}}
    one, two = folder(tmp_path / "a"), folder(tmp_path / "b", 8, changes)
    assert run(["diff", str(one), str(two)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"A  {one}: steps 0 to 6",
        f"B  {two}: steps 0 to 8",
        "",
        "different from step 4 on, first in: parameters",
        "identical before it; compared: steps 0 to 6",
        "losses are at most 0.125 apart, at step 5",
        "B continues to step 8, with nothing to compare with",
        "",
        "step  loss A  loss B  apart  norm A  norm B  parameters  samples",
        "----  ------  ------  -----  ------  ------  ----------  -------",
        "3     4.125   4.125   0      0.5     0.5     the same    24",
        "4     4       4       0      0.5     0.5     differ      32",
        "5     3.875   4       0.125  0.5     0.5     differ      40",
        "6     3.75    3.75    0      0.5     0.5     the same    48",
        "",
        "config, plugins, versions, device, data and layout are the same",
    ]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"consumed_samples": 7, "loss": 1.0}, ["consumed_samples", "loss"]),
        ({"grad_norm": 0.5000000000000001}, ["grad_norm"]),
        ({"grad_norm": None}, ["grad_norm"]),
        ({"loss": "NaN"}, ["loss"]),
        ({"fingerprint": "f" * 16, "time": 5}, None),
        ({"parameters": None}, None),
        ({"batch": "0" * 16, "loss": 1.0}, ["batch", "loss"]),
        ({"batch": None}, None),
    ],
    ids=[
        "position",
        "last digit",
        "skipped",
        "nan",
        "hash alone",
        "unknown parameters",
        "other samples",
        "unknown samples",
    ],
)
def test_values_are_compared_to_the_last_digit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    parts: list[str] | None,
) -> None:
    found = result(capsys, folder(tmp_path / "a"), folder(tmp_path / "b", changed={3: change}))
    expected = None if parts is None else {"step": 3, "parts": parts}
    assert found["first_difference"] == expected


def test_where_the_data_part_is_a_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {3: {"parameters": "0" * 16}, 4: {"batch": "0" * 16}, 6: {"consumed_samples": 7}}
    one, two = folder(tmp_path / "a"), folder(tmp_path / "b", changed=changes)
    found = result(capsys, one, two)
    assert found["first_difference"] == {"step": 3, "parts": ["parameters"]}
    assert causes(found) == [("data", "samples of step 4", [f"{11:016x}", "0" * 16])]
    run(["diff", str(one), str(two)])
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()]
    assert ["32,", "others"] in rows
    assert ["48,", "7"] in rows


def test_runs_of_earlier_versions_say_that_their_samples_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {step: {"batch": None} for step in range(7)}
    one, two = folder(tmp_path / "a"), folder(tmp_path / "b", changed=unknown)
    assert run(["diff", str(one), str(two)]) == 0
    assert "what each step read was not noted in both runs" in capsys.readouterr().out


def test_equal_nans_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = {3: {"loss": "NaN", "grad_norm": "Infinity"}}
    one, two = (folder(tmp_path / name, changed=change) for name in "ab")
    assert result(capsys, one, two)["identical"] is True


def test_a_long_run_is_shown_in_a_few_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {step: {"loss": 1.0} for step in range(10, 3000)}
    one, two = folder(tmp_path / "a", 2999), folder(tmp_path / "b", 2999, changes)
    shown = [row["step"] for row in result(capsys, one, two)["steps"]]
    assert shown == [9, 10, 11, 13, 17, 25, 41, 73, 2999]


def test_every_kind_of_cause_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [plugin["name"] for plugin in PLAN["plugins"]]
    plan = {
        **PLAN,
        "plugins": [{"name": names[1]}, {"name": names[0]}, *PLAN["plugins"][2:]],
        "layout": {**PLAN["layout"], "world_size": 4, "axes": {"tp": 2, "cp": 2}},
        "environment": {},
        "origins": {},
    }
    about = {
        "versions": {"torch": "2.13.0"},
        "device": {"name": "cpu", "threads": 2},
        "machine_choices": {"plugins.cpu.bf16_matmul_dtype": "bf16"},
        "data": {"d/t": {"bin": {"size_bytes": 5, "sha256_of_ends": "a" * 64}, "idx": None}},
    }
    other = {
        "versions": {"torch": "2.13.1"},
        "device": {"name": "cpu", "threads": 4},
        "machine_choices": {"plugins.cpu.bf16_matmul_dtype": "fp32"},
        "data": {"d/t": {"bin": {"size_bytes": 5, "sha256_of_ends": "b" * 64}, "idx": None}},
    }
    lr = re.search(r"^lr = (\S+)", CONFIG, re.MULTILINE)
    assert lr is not None
    config = CONFIG.replace(lr[0], "lr = 0.125")
    one = folder(tmp_path / "a", environment=about)
    two = folder(tmp_path / "b", environment=other, plan=plan, config=config)
    lock = json.loads((two / "plugins.lock.json").read_text())
    del lock[names[2]]
    lock[names[3]]["version"] = "0.2.0"
    lock[names[4]]["sha256"] = "c" * 64
    (two / "plugins.lock.json").write_text(json.dumps(lock))

    found = result(capsys, one, two)

    assert found["identical"] is True
    assert found["first_difference"] is None
    got = causes(found)
    assert ("config", "optimizer.lr", [lr[1], "0.125"]) in got
    assert ("plugin", names[2], ["enabled", "not enabled"]) in got
    assert ("plugin", f"{names[3]} version", ["0.1.0", "0.2.0"]) in got
    assert ("plugin", f"{names[4]} code", ["not recorded", "cccccccccccc"]) in got
    assert ("plugin", "order", [" ".join(names), " ".join([names[1], names[0], *names[2:]])]) in got
    assert ("version", "torch", ["2.13.0", "2.13.1"]) in got
    assert ("device", "threads", ["2", "4"]) in got
    assert ("device", "plugins.cpu.bf16_matmul_dtype", ["bf16", "fp32"]) in got
    ends = [f"5 bytes, sha256 {letter * 12}" for letter in "ab"]
    assert ("data", "d/t.bin", ends) in got
    assert ("layout", "ranks", ["2", "4"]) in got
    assert ("layout", "tp", ["1", "2"]) in got
    assert ("environment", "OMP_NUM_THREADS", ["1", "none"]) in got
    assert not [name for _, name, _ in got if name == "run.output_dir"]


def test_every_key_of_the_json_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {3: {"loss": 1.0}}
    found = result(capsys, folder(tmp_path / "a"), folder(tmp_path / "b", changed=changed))
    described = {*re.findall(r"`([a-z_]+)`", DOCS.read_text())}
    keys = {*found, *found["runs"][0], *found["compared"], *found["first_difference"]}
    keys |= {*found["largest_loss_difference"], *found["steps"][0], *PARTS}
    assert keys <= described


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: (f / FILE_NAME).unlink(), "holds no fingerprint.jsonl"),
        (lambda f: (f / FILE_NAME).write_text('{"event": "start", "format": 7}\n'), "has format 7"),
        (lambda f: (f / FILE_NAME).write_text(""), "the runs have no step in common"),
        (lambda f: [p.unlink() for p in f.iterdir()], "is not the folder of a run"),
        (lambda f: f.rename(f.with_name("gone")), "no run folder"),
    ],
    ids=["no fingerprints", "another format", "empty", "no run", "no folder"],
)
def test_what_cannot_be_compared_is_one_message_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Any, said: str
) -> None:
    one, two = folder(tmp_path / "a"), folder(tmp_path / "b")
    break_it(two)
    assert run(["diff", str(one), str(two)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_runs_without_a_common_step_are_refused_with_the_steps_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = folder(tmp_path / "a", 3), folder(tmp_path / "b", 9, first=5)
    assert run(["diff", str(one), str(two)]) == 2
    assert "one has steps 0 to 3, the other steps 5 to 9" in capsys.readouterr().err


def test_a_file_is_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = folder(tmp_path / "a")
    assert run(["diff", str(one), str(one / "plan.json")]) == 2
    assert "plan.json' is a file" in capsys.readouterr().err


def test_the_shell_completes_the_command_and_its_option() -> None:
    assert "diff" in completions([], "di")
    assert "--json" in completions(["diff"], "--")


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    paths = [str(folder(tmp_path / name)) for name in "ab"]
    code = (
        "import sys\n"
        "from ascend_run.entrypoints.cli import run\n"
        "assert run(['diff', *sys.argv[1:]]) == 0\n"
        "assert not {'torch', 'numpy', 'structlog', 'rich', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, *paths], timeout=60, check=True)
