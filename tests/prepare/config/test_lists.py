"""Lists: what a file and a command line may write for one, and what is no list."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.prepare.config.loading import read_raw
from tests.support.tiny_configs import SMALLEST, build, problems_of


def test_a_list_of_words_on_the_command_line_is_split_at_commas(file: Path) -> None:
    assert build(file, "data.train=a,b c").config.data.train == ("a", "b c")
    assert build(file, "data.train=one").config.data.train == ("one",)
    assert build(file, 'data.train = ["one"]').config.data.train == ("one",)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('data.train = "one"', "data.train='one': expected a list of strings; write ['one']"),
        ("data.train='one'", "data.train='one': expected a list of strings; write ['one']"),
        ("data.train=[1, 2]", "data.train=[1, 2]: expected a list of strings"),
        ("data.train={a = 1}", "data.train={'a': 1}: expected a list of strings"),
        (
            "data.train=[a,b]",
            "data.train='[a,b]': expected a list of strings; write a,b or '[\"a\", \"b\"]'",
        ),
        (
            'data.train="a","b"',
            'data.train=\'"a","b"\': expected a list of strings; write a,b or \'["a", "b"]\'',
        ),
    ],
)
def test_toml_that_is_no_list_is_refused_on_the_command_line(
    file: Path, override: str, problem: str
) -> None:
    """Its quotes and brackets never become a part of a word."""
    assert problems_of(file, override) == [f"{problem} (command line)"]


def test_a_string_where_a_file_needs_a_list_is_refused_with_the_list(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "c.toml", tmp_path / "c.yaml"
    toml.write_text(SMALLEST + '[data]\ntrain = "one"\n[plugins.swap]\nlayers = 1\n')
    yaml.write_text("data: {train: one}\nplugins: {swap: {layers: 1}}\n")
    for path in (toml, yaml):
        told = [problem for problem in problems_of(path) if "expected a list" in problem]
        assert [problem.rpartition(" (")[0] for problem in told] == [
            "data.train='one': expected a list of strings; write ['one']",
            "plugins.swap.layers=1: expected a list of whole numbers; write [1]",
        ]
    with pytest.raises(ConfigError, match=r"enable='x': expected a list of strings; write"):
        _ = read_raw(None, ['enable="x"']).enable
