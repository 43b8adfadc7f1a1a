from __future__ import annotations

import os
from pathlib import Path

import pytest

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import ConfigError


def test_a_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": null}')
    assert read_hf_config(tmp_path) == {"model_type": "llama", "rope_scaling": None}


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf_path must name a folder"):
        read_hf_config(tmp_path / "meta-llama")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    os.mkfifo(tmp_path / "config.json")  # must not be waited for
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is given twice"),
        (b'{"rope": {"theta": 1, "theta": 2}}', "'theta' is given twice"),
    ],
    ids=["empty", "cut", "utf-16", "deep", "long-number", "list", "twice", "twice-inside"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_hf_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="too many for this file"):
        read_hf_config(tmp_path)
