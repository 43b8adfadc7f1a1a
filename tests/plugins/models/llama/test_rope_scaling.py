"""Logits and gradients of a Llama with RoPE scaling, against transformers, and the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.models.llama import Llama
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from ascend_run.testing.pool import GlooPool
from tests.plugins.models.cases import BY_NAME
from tests.support.against_transformers import Reference, check_one_rank
from tests.support.tiny_configs import model_fields, parallel_fields

FAMILY, LLAMA = Llama.family, BY_NAME["llama"]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
    },
}
"""For sequences of 16 tokens and heads of 4 pairs."""
LONGEST = {"dynamic": 8}
"""Original maximum sequence length, before dynamic scaling."""


@pytest.mark.parametrize("kind", ROPES)
def test_logits_and_gradients_are_those_of_transformers(
    kind: str, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    rope = {"rope_theta": 100.0, "rope_type": kind, **ROPES[kind]}
    model = LLAMA.model(rope_parameters=rope, max_position_embeddings=LONGEST.get(kind, 64))
    reference = Reference("llama", model, tmp_path, LLAMA.in_our_layout)
    check_one_rank(reference, gloo_pool)
    plain = LLAMA.model(rope_parameters={"rope_theta": 100.0, "rope_type": "default"})
    plain.load_state_dict(model.state_dict())
    unscaled = plain(input_ids=reference.tokens).logits
    assert (unscaled - reference.logits).abs().max() > 0.05, "the scaling counts"


@pytest.mark.parametrize("kind", ROPES)
def test_what_is_written_transformers_reads_as_it_was(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 100.0, "rope_type": kind, **ROPES[kind]}
    LLAMA.model(rope_parameters=rope).config.save_pretrained(tmp_path / "theirs")
    values = config_from_hf(FAMILY, read_hf_config(tmp_path / "theirs"))
    fields = {k.removeprefix("model."): v for k, v in {**FAMILY.defaults, **values}.items()}
    config = RunConfig(model=model_fields(fields), parallel=parallel_fields())
    written = config_to_hf(FAMILY, config)
    again = AutoConfig.for_model(**written)
    wanted = AutoConfig.from_pretrained(tmp_path / "theirs").rope_parameters
    assert {k: again.rope_parameters[k] for k in wanted} == wanted
