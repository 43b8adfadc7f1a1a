"""Bytes on storages: of the quantised base, while it is loaded, and in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.support.costs import planned
from tests.support.tiny_llama import write_llama

from .qlora_jobs import Bytes, loading_bytes

HIDDEN, FEED, VOCAB = 512, 1024, 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of four layers whose linears are most of it."""
    folder = tmp_path_factory.mktemp("base")
    base = write_llama(
        folder, VOCAB, hidden_size=HIDDEN, intermediate_size=FEED, num_hidden_layers=4
    )
    return {
        "model.family": "llama",
        "model.hf_path": base,
        "model.make_vocab_size_divisible_by": 8,
        "data.seq_length": 16,
        "train.precision": "bf16",
        "plugins.lora.rank": 1,
    }


def test_the_base_takes_a_quarter_and_never_exists_in_full(
    gloo_pool: GlooPool, run: dict[str, Any]
) -> None:
    """At most one weight is full at any time, also as it is drawn or read, in float32."""
    found: Bytes
    (found,) = gloo_pool.run(loading_bytes, 1, run, ("lora", "qlora"), timeout=100)
    assert found.quantised / found.in_bf16 == pytest.approx(0.516 / 2, rel=1e-3)
    assert found.quantised < 0.29 * found.in_bf16
    ends, norms = 2 * VOCAB * HIDDEN, 9 * HIDDEN
    adapters = 4 * (3 + 1 + 2 + 2 + 1 + 0.5 + 0.5 + 1 + 4 + 1) * HIDDEN
    assert found.held - found.quantised == 2 * (ends + norms + adapters)
    assert found.in_bf16 > 8 * found.largest
    # One weight in the run's dtype, and in float32 as it is drawn.
    assert found.peak <= found.held + found.largest + 2 * found.largest < found.in_bf16
    (plain,) = gloo_pool.run(loading_bytes, 1, run, ("lora",), timeout=100)
    assert plain.quantised == 0
    assert plain.peak > found.in_bf16


def test_the_plan_has_the_bytes_of_the_base() -> None:
    """Weights of 48, 32, 96 and 48 rows by 32 in two layers; codes, scales, their scales and
    offsets; in place of float32."""
    _, (plain,) = planned(DENSE, ("lora",))
    _, (cost,) = planned(DENSE, ("lora", "qlora"))
    numels = [2 * 32 * rows for rows in (48, 32, 96, 48)]
    stored = sum(n // 2 + n // 64 + 2 * (4 + 4) for n in numels)
    assert plain.memory.weights - cost.memory.weights == 4 * sum(numels) - stored
    assert cost.parameters == plain.parameters
    assert cost.trained_parameters == plain.trained_parameters
    assert cost.memory.optimizer == plain.memory.optimizer
    single = {**DENSE, "plugins.qlora.use_double_quant": False, "plugins.qlora.blocksize": 32}
    _, (cost,) = planned(single, ("lora", "qlora"))
    stored = sum(n // 2 + 4 * (n // 32) for n in numels)
    assert plain.memory.weights - cost.memory.weights == 4 * sum(numels) - stored


def test_the_plan_of_seven_billion_weights_is_that_of_the_page() -> None:
    sizes = {
        **DENSE,
        "model.num_layers": 32,
        "model.hidden_size": 4096,
        "model.ffn_hidden_size": 11008,
        "model.num_attention_heads": 32,
        "model.num_query_groups": 32,
        "model.kv_channels": 128,
        "model.vocab_size": 32000,
        "train.precision": "bf16",
        "plugins.lora.rank": 1,
    }
    _, (plain,) = planned(sizes, ("lora",))
    _, (cost,) = planned(sizes, ("lora", "qlora"))
    assert plain.memory.weights / 1e9 == pytest.approx(13.5, abs=0.05)
    assert cost.memory.weights / 1e9 == pytest.approx(3.9, abs=0.05)
