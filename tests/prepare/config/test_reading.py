from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.prepare.config.raw import RawValue
from ascend_run.prepare.config.reading import read_raw


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_toml_and_yaml_of_one_content_are_one_config(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        "a.toml",
        'enable = ["x"]\n[model]\nnum_layers = 2\n[optimizer]\nlr = 1e-4\n[plugins.x]\na = true\n',
    )
    yaml = write(
        tmp_path,
        "a.yaml",
        "enable: [x]\nmodel:\n  num_layers: 2\noptimizer: {lr: 1e-4}\nplugins: {x: {a: true}}\n",
    )
    values = [{key: given.value for key, given in read_raw(f).values.items()} for f in (toml, yaml)]
    assert (
        values[0]
        == values[1]
        == {
            "enable": ["x"],
            "model.num_layers": 2,
            "optimizer.lr": 1e-4,
            "plugins.x.a": True,
        }
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nnum_layers = 2\n", "c.toml:2"),
        ("model.num_layers = 2\n", "c.toml:1"),
        ("# x\nmodel = { num_layers = 2 }\n", "c.toml:2"),
        ("\"model\".'num_layers' = 2 # why\n", "c.toml:1"),
        ("[ model ] # x\r\n\r\nnum_layers=2\r\n", "c.toml:3"),
        (
            '[run]\noutput_dir = """\n[model]\nnum_layers = 3\n"""\n[model]\nnum_layers = 2\n',
            "c.toml",
        ),
    ],
)
def test_a_value_knows_its_line_and_never_a_wrong_one(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert read_raw(write(tmp_path, "c.toml", text)).values["model.num_layers"] == RawValue(
        2, expected
    )


def test_yaml_values_know_their_lines(tmp_path: Path) -> None:
    raw = read_raw(
        write(tmp_path, "c.yml", "# x\nmodel:\n  num_layers: 2\n  window_size: [1, 2]\n")
    )
    assert raw.values["model.num_layers"].origin == "c.yml:3"
    assert raw.values["model.window_size"].origin == "c.yml:4"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("-3", -3),
        ("~", None),
        ("", None),
        ("TRUE", True),
        ('"true"', "true"),
        ("'3'", "3"),
    ],
)
def test_yaml_scalars_are_those_of_its_core_schema(
    tmp_path: Path, text: str, value: object
) -> None:
    raw = read_raw(write(tmp_path, "c.yaml", f"run:\n  seed: {text}\n"))
    seen = raw.values["run.seed"].value
    assert seen == value
    assert type(seen) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "a = 1\na = 2\n", "line 2"),
        ("c.toml", "[model\n", "line 1"),
        ("c.toml", f"a = {'[' * 5000}", "nested too deeply"),
        ("c.toml", f"a = {'9' * 5000}", "too many digits"),
        ("c.yaml", "model: {a: 1, b: 2, a: 3}\n", "line 1: 'a' is given twice, first on line 1"),
        ("c.yaml", "model: &x {a: 1}\ndata: *x\n", "line 1: anchors and aliases"),
        ("c.yaml", "model: !!python/object:os.system {}\n", "line 1: tags are not supported"),
        ("c.yaml", "a: [1\n", "line 2"),
        ("c.yaml", "? [a]\n: 1\n", "line 1: a key must be a word"),
        ("c.yaml", f"a: {'[' * 200_000}", "nested too deeply"),
        ("c.yaml", f"a: {'9' * 5000}", "too many digits"),
        ("c.yaml", "a: 1\n---\nb: 2\n", "line 2"),
        ("c.yaml", "a: \x01\n", "special characters"),
        ("c.toml", b"a = '\xff'\n", "not UTF-8: byte 5"),
        ("c.toml", b"#" * 2**19, "larger than"),
        ("c.json", "{}", "expected a name ending in .toml or .yaml"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_raw(write(tmp_path, name, text))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_raw(tmp_path / "nowhere.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        read_raw(tmp_path / "folder.toml")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.num_layers=4", "model.num_layers", 4),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("model.share_embeddings_and_output_weights=true", None, True),
        ("plugins.swap-attention.min_bytes=1MiB", "plugins.swap-attention.min_bytes", "1MiB"),
        ('data.train=["a", "b"]', "data.train", ["a", "b"]),
        ("run.output_dir=runs/a=b", "run.output_dir", "runs/a=b"),
        ("run.output_dir=", "run.output_dir", ""),
        ("run.seed=1\nrun.x=2", "run.seed", "1\nrun.x=2"),
        ("run.seed=[1", "run.seed", "[1"),
    ],
)
def test_an_override_is_a_toml_value_or_plain_text(
    override: str, key: str | None, value: object
) -> None:
    ((seen_key, given),) = read_raw(None, [override]).values.items()
    assert seen_key == (key or override.partition("=")[0])
    assert given.value == value
    assert given.origin == "command line"


def test_the_command_line_counts_over_the_file_and_the_last_of_two_counts(tmp_path: Path) -> None:
    file = write(tmp_path, "c.toml", "[run]\nseed = 1\n")
    assert read_raw(file, ["run.seed=2", "run.seed=3"]).values["run.seed"].value == 3


def test_all_invalid_overrides_are_reported_together() -> None:
    with pytest.raises(ConfigError) as refused:
        read_raw(None, ["model.num_layers", "=3"])
    assert len(refused.value.problems) == 2


def test_the_top_level_is_known_before_any_plugin_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, "c.toml", 'enable = ["a"]\n[model]\nfamily = "mixtral"\nhf_path = "m"\n')
    raw = read_raw(file, ["enable=b,c"])
    assert (raw.enable, raw.platform, raw.task) == (("b", "c"), "cpu", "pretrain")
    assert (raw.family, raw.hf_path) == ("mixtral", "m")
    assert raw.replacing("--enable", enable=("d",), platform=None).enable == ("d",)


def test_a_top_level_value_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    raw = read_raw(write(tmp_path, "c.toml", 'enable = "ulysses"\n'))
    with pytest.raises(ConfigError, match=r"enable='ulysses': expected a list of strings"):
        raw.enable
