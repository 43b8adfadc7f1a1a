"""A run with the demo's plugins that is cut in two comes out bit for bit the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ascend_run.plugin_api import Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import discover
from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Runs

DEMO = Path(__file__).parents[2] / "examples/demo.toml"


def test_a_run_in_two_halves_is_the_run_in_one(gloo_pool: GlooPool, tmp_path: Path) -> None:
    catalogue = discover()
    enabled = [name for name in tomllib.loads(DEMO.read_text())["enable"] if name in catalogue]
    owner = {
        claim: name for name, found in catalogue.load(enabled).items() for claim in claims_of(found)
    }
    values = {
        **MOE,
        "model.attention_dropout": 0.1,
        "model.hidden_dropout": 0.1,
        "train.micro_batch_size": 2,
        "parallel.context_parallel_size": 2 if Claim.CONTEXT_PARALLEL in owner else 1,
        "parallel.expert_model_parallel_size": 2,
    }
    if "swap-attention" in enabled:  # a tiny model's tensors are small
        values["plugins.swap-attention.min_bytes"] = 1
    runs = Runs(gloo_pool, tmp_path, (values, 2, tuple(enabled)))
    runs.assert_the_same_in_two_halves()
