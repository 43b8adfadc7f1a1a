"""Published config.json files, by family: every key is known, and what disagrees is refused.

The files of ``published_configs`` have the keys of well-known models' folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.plugin_api import ConfigError, ModelFamily
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from ascend_run.registry.discovery import discover
from tests.support import family_checks

CONFIGS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "published_configs").glob("*.json"))
}
MODELS: Final = [(family, name) for family, configs in CONFIGS.items() for name in configs]
CATALOGUE: Final = discover()
DEPTHS: Final = ("num_hidden_layers", "num_layers", "n_layer")
WIDTHS: Final = ("hidden_size", "n_embed", "n_embd")


def record(family: str) -> ModelFamily:
    found: ModelFamily = CATALOGUE.load([family])[family]().ascend_model_family()
    return found


def of_names(config: dict[str, Any], names: tuple[str, ...]) -> set[int]:
    return {config[name] for name in names if name in config}


@pytest.mark.parametrize(("family", "name"), MODELS)
def test_a_published_config_is_read(family: str, name: str) -> None:
    published = CONFIGS[family][name]
    values = config_from_hf(record(family), published)
    assert {values["model.num_layers"]} == of_names(published, DEPTHS)
    assert {values["model.hidden_size"]} == of_names(published, WIDTHS)


@pytest.mark.parametrize(
    ("family", "name", "change", "problem"),
    [
        ("qwen2", "Qwen2.5-7B", {"use_mrope": True}, "use_mrope is True; only False"),
        ("chatglm", "glm-4-9b-chat", {"num_hidden_layers": 39}, "num_hidden_layers are one key"),
        ("gemma2", "gemma-2-9b", {"sliding_window_size": 8}, "sliding_window_size are one key"),
        ("internlm", "internlm-7b", {"rope_theta": 500.0}, "rotary.base and rope_theta are one"),
        ("internlm", "internlm-7b", {"rotary": {"type": "other"}}, "rotary.type is 'other'; only"),
        ("internlm", "internlm-7b", {"rotary": {"bass": 9}}, "unknown key 'rotary.bass'"),
        ("internlm", "internlm-7b", {"rotary": 500}, "unknown key 'rotary'"),
        ("llama", "Yi-6B", {"rotary": {"base": 500}}, "unknown key 'rotary'"),
    ],
)
def test_what_disagrees_is_refused(
    family: str, name: str, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_from_hf(record(family), CONFIGS[family][name] | change)


@pytest.mark.parametrize("kind", ["dynamic", "origin"])
@pytest.mark.parametrize("base", [10000, 500])
def test_the_rotary_base_of_internlm_is_that_of_its_rotary(base: int, kind: str) -> None:
    ours = record("internlm")
    published = CONFIGS["internlm"]["internlm-7b"] | {"rotary": {"base": base, "type": kind}}
    assert config_from_hf(ours, published)["model.rotary_base"] == base
    same = config_from_hf(ours, {**published, "rope_theta": float(base)})
    assert same["model.rotary_base"] == base
    written = config_to_hf(ours, family_checks.run_config(ours, published))
    assert written["rotary"] == {"base": base, "type": "dynamic"}
    assert "rope_theta" not in written
    assert not [key for key in written if "." in key]
    del published["rotary"]
    assert config_from_hf(ours, published)["model.rotary_base"] == 10000
