"""Whatever the file and the command line hold, the answer is a config or an AscendRunError."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.core.config.layout import layout_of
from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.checks.layout import run_problems
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.config.schema import all_options
from tests.support.tiny_configs import OPTION_CLASSES, SMALLEST, build

BOUNDED = settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
KEYS = sorted(all_options(OPTION_CLASSES))
SCALARS = st.sampled_from(
    [
        *("0", "1", "-1", "3", "10", "1e-3", "-0.0", "inf", "nan", "9223372036854775808", "0x1"),
        *("true", "True", "none", "null", "~", "[]", "{}", "[1,2]", "[[1]]", "{a=1}", ".5"),
        *('""', '"x"', "'3'", "2024-01-01", "12:00", "1MiB", "x,y", '"\\u0000"'),
        *("!!python/name:os", "*a", "&a"),
    ]
)
SOUND = (
    SMALLEST
    + """
[parallel]
tensor_model_parallel_size = 2
[data]
train = ["a", "b"]
train_weights = [0.5, 0.5]
[optimizer]
lr = 1e-3
lr_decay_style = "WSD"
[plugins.swap]
min_bytes = "1MiB"
"""
)


def settle(file: Path | None, *overrides: str) -> None:
    """Do everything that the launcher does with a config; a refusal is a fine end."""
    try:
        resolved = build(file, *overrides)
        run_problems(resolved.config, layout_of(resolved.config, 4), sequence_multiple=1)
        render_toml(resolved)
    except AscendRunError as refusal:
        str(refusal).encode(errors="backslashreplace")


@BOUNDED
@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS) | st.text(max_size=12), SCALARS | st.text(max_size=8)),
        max_size=5,
    )
)
def test_no_override_gives_a_traceback(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    file = tmp_path / "sound.toml"
    file.write_text(SOUND)
    settle(file, *(f"{key}={value}" for key, value in pairs))


@BOUNDED
@given(
    st.sampled_from([".toml", ".yaml"]),
    st.lists(
        st.tuples(st.integers(0, len(SOUND)), st.integers(0, 6), SCALARS | st.text(max_size=4)),
        min_size=1,
        max_size=4,
    ),
)
def test_no_mutation_of_a_file_gives_a_traceback(
    tmp_path: Path, suffix: str, edits: list[tuple[int, int, str]]
) -> None:
    text = SOUND
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    if suffix == ".yaml":
        text = text.replace("[", "").replace("]\n", ":\n").replace(" =", ":").replace("\n", "\n ")
    file = tmp_path / f"mutated{suffix}"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    settle(file)


@BOUNDED
@given(st.sampled_from([".toml", ".yaml"]), st.binary(max_size=60))
def test_no_bytes_give_a_traceback(tmp_path: Path, suffix: str, content: bytes) -> None:
    file = tmp_path / f"bytes{suffix}"
    file.write_bytes(content)
    settle(file)


@BOUNDED
@given(st.data())
def test_no_yaml_of_known_keys_gives_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name}: {data.draw(SCALARS)}")
    file = tmp_path / "known.yaml"
    file.write_text(
        "".join(f"{s}: {{{', '.join(e)}}}\n" for s, e in sections.items() if "." not in s)
    )
    settle(file)
