from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.shell_completion import ShellComplete

from ascend_run.entrypoints.cli import program, run
from ascend_run.entrypoints.commands import commands
from tests.support.installed import Install, offer


def completions(words: Sequence[str], incomplete: str) -> set[str]:
    completion = ShellComplete(program, {}, "ascend-run", "_ASCEND_RUN_COMPLETE")
    return {item.value for item in completion.get_completions([*words], incomplete)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert f"_ASCEND_RUN_COMPLETE={shell}_complete" in script
    assert "ascend-run" in script


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_the_first_word_completes_to_commands() -> None:
    assert completions([], "") == {*commands()}
    assert completions([], "pl") == {"plan", "plugins"}


def test_the_first_word_completes_to_options_of_training() -> None:
    assert {"--enable", "--config", "--help"} <= completions([], "--")


@pytest.mark.parametrize("command", [[], ["train"], ["plan"]], ids=str)
def test_features_complete_and_nothing_else_does(install: Install, command: list[str]) -> None:
    offer(install, "relay")

    found = completions([*command, "--enable"], "")

    assert "relay" in found
    assert not {"cpu", "pretrain", "llama"} & found


def test_a_list_of_features_completes_its_last_word_without_repeating(install: Install) -> None:
    offer(install, "relay")
    offer(install, "relic")

    assert completions(["plan", "--enable"], "relay,rel") == {"relay,relic"}


def test_platforms_and_tasks_complete() -> None:
    assert "cpu" in completions(["plan", "--platform"], "")
    assert "pretrain" in completions(["plan", "--task"], "p")


def test_names_of_other_packages_complete_without_running_them(install: Install) -> None:
    folder = offer(
        install, "relay", "from pathlib import Path\nPath(__file__).with_name('ran').touch()"
    )

    assert completions(["plugins", "show"], "rel") == {"relay"}
    assert not (folder / "ran").exists()


def test_the_program_completes_words_for_a_shell() -> None:
    process = subprocess.run(
        [sys.executable, "-c", "from ascend_run.entrypoints.cli import main; main()"],
        env={
            "PATH": "/usr/bin:/bin",
            "_ASCEND_RUN_COMPLETE": "bash_complete",
            "COMP_WORDS": "ascend-run plan --platform cp",
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert process.stdout == "plain,cpu\n"
