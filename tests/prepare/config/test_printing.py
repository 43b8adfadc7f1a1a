from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import ConfigError
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.config.schema import Option, all_options
from ascend_run.prepare.config.value_types import describe
from tests.support.tiny_configs import OPTION_CLASSES, SMALLEST, build

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
WHOLE = st.integers(-(2**40), 2**40)
VALUES = {
    "true or false": st.booleans(),
    "a whole number": WHOLE,
    "a number": st.floats(allow_nan=False, allow_infinity=False),
    "a string": TEXT,
    "a list of strings": st.lists(TEXT, max_size=3),
    "a list of numbers": st.lists(st.floats(0, 10), max_size=3),
    "a list of whole numbers": st.lists(WHOLE, max_size=3),
}


def values_of(option: Option) -> st.SearchStrategy[object]:
    """Values of an option's type, None where it may be unset, and sometimes the default's own."""
    choices = [VALUES[word] for word in describe(option.type).split(" or ") if word in VALUES]
    if choices and "none" in describe(option.type):
        choices.append(st.just("none"))
    return st.one_of(*choices, st.just(option.default))


def toml_text(value: object) -> str:
    from ascend_run.prepare.config.printing import _toml

    return _toml("none" if value is None else value)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_what_is_printed_is_built_again_identically(tmp_path: Path, data: st.DataObject) -> None:
    options = all_options(OPTION_CLASSES)
    keys = data.draw(st.lists(st.sampled_from(sorted(options)), max_size=12, unique=True))
    overrides = [f"{key}={toml_text(data.draw(values_of(options[key])))}" for key in keys]
    file = tmp_path / "smallest.toml"
    file.write_text(SMALLEST)
    family = {"model.hidden_dropout": 0.0, "model.kv_channels": 16}
    try:
        first = build(file, *overrides, family=family)
    except ConfigError:
        return
    printed = tmp_path / "printed.toml"
    printed.write_text(render_toml(first), encoding="utf-8")
    second = build(printed, family=family)
    assert second.config == first.config
    printed.write_text(render_toml(second), encoding="utf-8")
    assert build(printed, family=family).config == first.config


def test_each_line_says_where_its_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "demo.toml"
    file.write_text(SMALLEST)
    lines = render_toml(
        build(
            file,
            "train.train_iters=7",
            "plugins.swap.folder=none",
            "parallel.sequence_parallel=true",
            family={"model.normalization": "RMSNorm"},
        )
    ).splitlines()
    assert lines[0].startswith("#")
    for line in (
        "num_layers = 2  # demo.toml:3",
        "train_iters = 7  # command line",
        "seed = 1234  # default",
        "normalization = \"RMSNorm\"  # family 'llama'",
        'mode = "sync"  # plugin default',
        'folder = "none"  # command line',
        "sequence_parallel = true  # command line",
    ):
        assert line in lines
    assert not any("Megatron's default" in line for line in lines)


def test_a_name_that_cannot_stand_in_a_comment_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "a\nnum_layers = 3.toml"
    file.write_text(SMALLEST)
    resolved = build(file)
    printed = tmp_path / "printed.toml"
    printed.write_text(render_toml(resolved), encoding="utf-8")
    assert build(printed).config == resolved.config


@pytest.mark.parametrize(
    "text", ['"', "\\", "\u2028", "\x85", "\x7f", "\t", "\U0001f600", "#", "é"]
)
def test_any_text_survives_printing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "demo.toml"
    file.write_text(SMALLEST)
    printed = tmp_path / "printed.toml"
    printed.write_text(render_toml(build(file, f"run.output_dir=x{text}x")), encoding="utf-8")
    assert build(printed).config.run.output_dir == f"x{text}x"
