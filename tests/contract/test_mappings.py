"""In prepare and core, what is our own is a record: a mapping is read by a literal key only where
another program, a file or a library defines it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

import ascend_run

PACKAGE: Final = Path(ascend_run.__file__).parent
ROOMS: Final = ("prepare", "core")
READ: Final[dict[str, dict[str, set[str]]]] = {
    "the user's values, behind the properties of RawConfig": {
        "prepare/config/raw.py": {"parsed", "self.values"},
    },
    "content of a file, typed where it is read": {
        "core/checkpoint/manifest.py": {"content", "value"},
        "core/checkpoint/shard_file.py": {"entry"},
        "core/hugging_face/json_files.py": {"read_hf_config(folder)"},
        "core/hugging_face/stored_tensors.py": {"read_object(index)"},
        "core/log/metrics.py": {"events[-1]", "r", "record"},
    },
    "Hugging Face's config.json, translated key by key": {
        "core/hugging_face/parameter_rows.py": {"_MTP"},
        "core/model/rotary_scaling.py": {"given"},
        "prepare/hugging_face/config_keys.py": {
            *("family.defaults", "names", "remaining", "result", "values"),
        },
        "prepare/hugging_face/layer_rope.py": {"local"},
        "prepare/hugging_face/latent_rope.py": {"found"},
        "prepare/hugging_face/rope.py": {"config_json", "parameters", "scalings"},
    },
    "named tensors of a batch, a sample index or a state": {
        "core/checkpoint/entries.py": {"saved", "state"},
        "core/data/epochs.py": {"arrays", "sample"},
        "core/data/samples.py": {"self._arrays"},
        "core/model/gpt.py": {"batch"},
    },
    "dicts of torch, Megatron, structlog and Python": {
        "core/checkpoint/optimizer_shards.py": {
            "members",
        },
        "core/config/megatron_fields.py": {"given"},
        "core/log/setup.py": {"event"},
        "core/model/transformer_config.py": {"arguments", "chosen"},
        "core/patches.py": {"sys.modules"},
        "core/train/megatron_optimizers.py": {
            *("group", "self._get_model_param_range_map(parameter)"),
        },
        "core/train/optimizer.py": {"group"},
        "core/train/optimizer_kinds.py": {"group"},
        "core/train/step.py": {"optimizer.param_groups[0]"},
    },
    "metrics of a step, of the kernel and of any plugin": {
        "core/recorder.py": {"readings"},
    },
    "the environment": {
        "core/rank/default_group.py": {"os.environ"},
        "core/rank/rank_environment.py": {"environment"},
        "prepare/rank_start.py": {"os.environ"},
    },
}
"""Why -> module -> the mappings that it reads by a literal key."""


def read_by_string(source: str) -> set[str]:
    """The expressions of mappings that are read by a literal key."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Subscript(value=mapping, slice=ast.Constant(value=str()), ctx=ast.Load())
                | ast.Call(
                    func=ast.Attribute(value=mapping, attr="get" | "pop" | "setdefault"),
                    args=[ast.Constant(value=str()), *_],
                )
            ):
                found.add(ast.unparse(mapping))
    return found


def test_only_what_others_define_is_read_by_string() -> None:
    """A mapping of our own becomes a record instead of a row of the table."""
    found = {
        str(path.relative_to(PACKAGE)): mappings
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if (mappings := read_by_string(path.read_text(encoding="utf-8")))
    }
    assert found == {module: names for rows in READ.values() for module, names in rows.items()}


@pytest.mark.parametrize(
    "source",
    [
        'step = values["progress"]',
        'step = values.get("progress", {})["went_back_to"]',
        'if values.pop("step"): pass',
    ],
)
def test_a_read_by_string_is_found(source: str) -> None:
    assert "values" in read_by_string(source)


@pytest.mark.parametrize("source", ['values["step"] = 3', "values[0]", 'del values["step"]'])
def test_writing_and_reading_by_position_are_none(source: str) -> None:
    assert read_by_string(source) == set()
