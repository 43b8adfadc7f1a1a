"""``ascend-run preset`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from ascend_run.entrypoints.cli import program, run
from ascend_run.tools.plan.cost_model.devices import find_device
from ascend_run.tools.preset.presets import find_preset, presets
from ascend_run.tools.preset.runs import Request
from ascend_run.tools.preset.writing import chosen_run
from tests.support.needed_plugins import names_of

GIB = 2.0**30
SMALLEST = {
    family: min((p for p in presets().values() if p.family == family), key=lambda p: p.parameters)
    for family in sorted({preset.family for preset in presets().values()})
}


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["preset", *words]) == 0
    return capsys.readouterr().out


def completions(words: Sequence[str], incomplete: str) -> set[str]:
    completion = ShellComplete(program, {}, "ascend-run", "_ASCEND_RUN_COMPLETE")
    return {item.value for item in completion.get_completions([*words], incomplete)}


def test_list_has_a_row_for_each_preset(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "list").splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:] if line and ":" not in line}
    assert {*rows} == {*presets()}
    assert rows["qwen2.5-7b"] == [
        *("qwen2.5-7b", "qwen2", "7,615,616,512", "7.62B", "131,072", "-"),
    ]


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(output_of(capsys, "list", "--json"))}
    assert rows["mistral-7b"] == {
        "name": "mistral-7b",
        "family": "mistral",
        "parameters": 7_241_732_096,
        "published": "7.24B",
        "context": 32768,
        "template": "mistral",
    }


@pytest.mark.needs_plugins("chatglm")
def test_show_has_the_numbers_their_source_and_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = output_of(capsys, "show", "glm-4-9b")
    assert "glm-4-9b: 9,399,951,360 parameters (9.40B as published)" in page
    for text in ("huggingface.co/THUDM/glm-4-9b-chat", "ffn_hidden_size = 13696", "glm4"):
        assert text in page
    model = tomllib.loads(page[page.index("[model]") :])["model"]
    assert (model["num_query_groups"], model["rotary_base"]) == (2, 5e6)


@pytest.mark.needs_plugins("gpt2")
def test_show_as_json_has_the_values_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(output_of(capsys, "show", "gpt3-175b", "--json"))
    assert shown["config"]["n_embd"] == shown["model"]["hidden_size"] == 12288
    assert (shown["context"], shown["seq_length"]) == (2048, 2048)
    assert "banded" in shown["note"]


@pytest.mark.parametrize("words", [["show"], ["write"]], ids=str)
def test_names_complete(words: list[str]) -> None:
    assert completions(["preset", *words], "Mix") == {"mixtral-8x7b", "mixtral-8x22b"}


@pytest.mark.needs_plugins("qwen2")
def test_a_written_file_is_accepted_by_plan_and_states_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    words = ("--devices", "16", "--memory", "64GiB", "--global-batch-size", "64", "-o", str(file))
    shown = output_of(capsys, "write", "qwen2.5-3b", *words)

    text = file.read_text()
    config = tomllib.loads(text)
    assert config["run"]["nproc"] == 8
    assert config["train"]["global_batch_size"] == 64
    assert config["model"]["hidden_size"] == 2048
    chosen = next(line for line in text.splitlines() if "chosen:" in line)
    assert chosen.removeprefix("# ") in shown
    assert "runner-up:" in text

    plan = ["plan", "--config", str(file), "--world", "16", "--device", "ascend-910b", "--json"]
    assert run(plan) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["time"]["fits"]
    assert max(stage["memory"]["peak"] for stage in cost["stages"]) <= 0.9 * 64 * GIB
    assert "--world 16" in text
    assert "--nnodes 2" in text


@pytest.mark.needs_plugins("llama", "qwen2")
def test_a_task_with_a_template_gets_the_one_of_the_preset() -> None:
    from ascend_run.tools.preset.runs import run_values

    def values(name: str, task: str) -> dict[str, object]:
        return run_values(Request(preset=find_preset(name), devices=8, task=task), 8)

    assert values("llama-2-7b", "sft")["plugins.sft.template"] == "llama2"
    assert "plugins.sft.template" not in values("qwen2.5-7b", "sft")
    assert not [key for key in values("llama-2-7b", "pretrain") if key.startswith("plugins.")]


DEVICES = ((15, 8), (100, 32), (400, 128), (1000, 512))
"""Billions of parameters -> devices whose memory is enough."""


def devices_of(family: str) -> int:
    """Enough for the family's smallest preset."""
    billions = SMALLEST[family].parameters / 1e9
    return next(number for most, number in DEVICES if billions < most)


@pytest.mark.exhaustive(by=lambda family: [devices_of(family) > DEVICES[0][1]])
@pytest.mark.parametrize("family", names_of(SMALLEST, lambda preset: (preset.family,)))
def test_a_preset_of_each_family_has_a_layout_that_plans(family: str) -> None:
    request = Request(preset=SMALLEST[family], devices=devices_of(family), seq_length=2048)
    values, choice = chosen_run(request, find_device("ascend-910b"), 64 * GIB)
    assert values["data.seq_length"] == 2048
    assert choice.best.peak <= 0.9 * 64 * GIB


@pytest.mark.needs_plugins("llama")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "lama-2-7b"], "no preset 'lama-2-7b'; did you mean llama-2-7b"),
        (["show", "qwen2.5"], "did you mean qwen2.5-0.5b or qwen2.5-1.5b"),
        (["write", "llama-7b", "--devices", "0"], "0 is not in the range x>=1"),
        (["write", "llama-7b", "--devices", "12"], "use 8 or 16"),
        (["write", "llama-7b", "--devices", "8", "--memory", "64"], "such as 64GiB or 80GB"),
        (["write", "llama-7b", "--devices", "8", "--memory", "0GiB"], "a size above 0"),
        (["write", "llama-7b", "--devices", "8", "--memory", "8 eggs"], "a size above 0"),
        (["write", "llama-7b", "--devices", "1", "--memory", "8GiB"], "the smallest need found"),
        (["write", "llama-7b", "--devices", "8", "--seq-length", "4096"], "use at most 2048"),
        (["write", "llama-7b", "--devices", "8", "--task", "stf"], "unknown plugin 'stf'"),
        (["write", "llama-7b", "--devices", "8", "--platform", "gpu"], "unknown plugin 'gpu'"),
        (["write", "llama-7b", "--devices", "8", "--device", "x"], "--device x: expected one of"),
        (["write", "llama-7b", "--devices", "8", "--task", "sft"], "with --data and --tokenizer"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message_and_nothing_is_written(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["-o", str(tmp_path / "run.toml")] if words[0] == "write" else []
    assert run(["preset", *words, *output]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not [*tmp_path.iterdir()]


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    assert run(["preset", "write", "llama-7b", "--devices", "8", "-o", str(file)]) == 2
    assert f"{file} exists; name a new file with -o" in capsys.readouterr().err
    assert file.read_text() == "mine"
    missing = tmp_path / "none" / "run.toml"
    assert run(["preset", "write", "llama-7b", "--devices", "8", "-o", str(missing)]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.needs_plugins("llama")
@pytest.mark.parametrize("words", [["--help"], ["list"], ["show", "llama-7b"]], ids=" ".join)
def test_reading_commands_import_no_torch(words: list[str]) -> None:
    script = (
        "import sys\n"
        "from ascend_run.entrypoints.cli import run\n"
        f"assert run(['preset', *{words!r}]) == 0\n"
        "assert not {'torch', 'megatron', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
