"""Checks shared by the tests of every model family, against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from ascend_run.core.hugging_face.importing import load_hf_weights
from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import ModelFamily, RunConfig, TensorShard
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from ascend_run.tools.convert.exporting import export_hf
from tests.support.tiny_configs import model_fields, parallel_fields


def run_config(family: ModelFamily, config_json: dict[str, Any], **changes: Any) -> RunConfig:
    """Return the family's defaults, updated by config.json and ``changes`` to ``[model]``."""
    values = {**family.defaults, **config_from_hf(family, config_json)}
    fields = {name.removeprefix("model."): value for name, value in values.items()}
    return RunConfig(model=model_fields(fields | changes), parallel=parallel_fields())


def check_keys_are_named_once(family: ModelFamily, shared: frozenset[str] = frozenset()) -> None:
    """Check that no key of config.json is in two tables, and no field is mapped twice.

    Args:
        shared: Fields that several keys map to.
    """
    names = [*{key.hf for key in family.keys}, *family.fixed, *family.ignored]
    assert sorted(names) == sorted(set(names))
    fields = [key.field for key in family.keys if key.field not in shared]
    assert sorted(fields) == sorted(set(fields))
    assert all(field.startswith("model.") for field in {*fields, *family.defaults})


LLAMA_LIKE = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    }
)


def check_transformers_defaults(
    family: ModelFamily, config_class: type, required: frozenset[str] = LLAMA_LIKE
) -> None:
    """Check that the family's default for a missing key equals transformers'.

    Args:
        required: Keys that must be given, whatever transformers' default.
    """
    assert {key.hf for key in family.keys if key.default is attrs.NOTHING} == required
    theirs = config_class()
    assert theirs.model_type == family.model_type
    seen = theirs.to_dict()
    if "rope_parameters" in seen:
        by_kind = seen["rope_parameters"]
        if "sliding_attention" in by_kind:
            seen["rope_local_base_freq"] = by_kind["sliding_attention"]["rope_theta"]
            seen["rope_parameters"] = by_kind["full_attention"]
        seen["rope_theta"] = seen["rope_parameters"]["rope_theta"]
        seen.setdefault("original_max_position_embeddings", 4096)  # longrope's; without, no effect
        seen["partial_rotary_factor"] = seen["rope_parameters"].get("partial_rotary_factor", 1.0)
        # Filled in by some classes where they are None.
        given = {field.name: field.default for field in dataclasses.fields(config_class)}
        filled = (
            "head_dim",
            "num_key_value_heads",
            "layer_types",
            "sliding_window",
            "v_head_dim",
        )
        seen |= {name: given.get(name) for name in filled}
    for key in family.keys:
        if key.hf not in required:
            name = key.hf if key.hf in seen else key.also
            assert key.default == seen[name], key.hf
    for name, value in family.fixed.items():
        if name in seen:  # not a key of the authors' own class
            assert seen[name] == (value[0] if isinstance(value, tuple) else value), name


def check_config_round_trip(family: ModelFamily, folder: Path) -> None:
    """Check that transformers reads our config.json as it reads its own."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(folder).to_dict()
    written = config_to_hf(family, run_config(family, read_hf_config(folder)))
    again = AutoConfig.for_model(**written).to_dict()
    if "head_dim" in read:
        read["head_dim"] = read["head_dim"] or read["hidden_size"] // read["num_attention_heads"]
    if "n_inner" in read:
        read["n_inner"] = read["n_inner"] or 4 * read["n_embd"]
    for name in {*read} - family.ignored:
        assert again[name] == read[name], name


def check_weights_round_trip(
    family: ModelFamily, folder: Path, shapes: dict[str, tuple[int, ...]], root: Path
) -> None:
    """Convert a transformers folder to our parameters and back to a folder that transformers loads.

    Args:
        shapes: Our parameters' shapes, by name.
    """
    from transformers import AutoModelForCausalLM

    export_again(family, folder, shapes, root)
    want, got = stored(folder), stored(root / "ours")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    # The default padding token of some classes is beyond a tiny vocabulary.
    model, report = AutoModelForCausalLM.from_pretrained(
        root / "ours", output_loading_info=True, pad_token_id=None
    )
    assert not any(report.values()), report
    reference = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    state = model.state_dict()
    assert state.keys() == reference.keys()
    assert all(torch.equal(state[name], reference[name]) for name in reference)


def export_again(
    family: ModelFamily, folder: Path, shapes: dict[str, tuple[int, ...]], root: Path
) -> None:
    """Load a folder's weights into parameters of these shapes and export them to ``root/ours``."""
    config = run_config(family, read_hf_config(folder))
    ours = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    shards = [
        TensorShard(key=name, tensor=x, global_shape=tuple(x.shape), offset=(0,) * x.dim())
        for name, x in ours.items()
    ]
    load_hf_weights(folder, family, config, shards)
    assert not any(tensor.isnan().any() for tensor in ours.values())
    export_hf(root / "ours", family, config, ours.items())


def stored(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder's safetensors files."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
