"""What is kept for backward, measured on storages, is what the page says."""

from __future__ import annotations

from typing import Any, Final

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.memory.moe_zero_memory.kept import SHARE, keeps_tokens, kept_share
from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.support.moe_memory import kept_bytes
from tests.support.tiny_configs import model_fields, parallel_fields

LEVEL: Final = "plugins.moe-zero-memory.level"
TOKENS, TOPK, LAYERS, ITEM = 32, 2, 4, 2
WIDTHS: Final = {
    "mixtral 8x7B": (256, 896),
    "gpt-oss": (176, 176),
    "qwen2 57B": (224, 160),
    "qwen3 235B": (256, 96),
    "deepseek v2": (320, 96),
    "deepseek v3": (448, 128),
}
"""H and F of models, a sixteenth of them."""


def config(hidden: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        **MOE,
        "model.num_layers": LAYERS,
        "model.hidden_size": hidden,
        "model.kv_channels": 8,
        "model.moe_ffn_hidden_size": width,
        "train.precision": "bf16",
        "data.seq_length": TOKENS,
        **more,
    }


@pytest.mark.exhaustive(by=lambda beside: [])
@pytest.mark.parametrize(
    ("beside", "besides"),
    [((), 5), pytest.param(("gmm",), 3, marks=pytest.mark.needs_plugins("gmm"))],
    ids=["loop", "gmm"],
)
def test_levels_save_their_shares_at_the_widths_of_models(
    gloo_pool: GlooPool, beside: tuple[str, ...], besides: int
) -> None:
    """Level 0 at least 70 % and level 1 at least 90 % of what recomputing the layer saves; and a
    token of an expert keeps H values or none, where it would keep H + 5 F, with gmm H + 3 F."""
    whole = {
        "model.recompute_granularity": "selective",
        "model.recompute_modules": ["moe"],
    }
    plugins = (*beside, "moe-zero-memory")
    runs = [
        run
        for hidden, width in WIDTHS.values()
        for run in (
            (beside, config(hidden, width)),
            (beside, config(hidden, width, **whole)),
            (plugins, config(hidden, width, **{LEVEL: 0})),
            (plugins, config(hidden, width, **{LEVEL: 1})),
        )
    ]
    (kept,) = gloo_pool.run(kept_bytes, 1, runs)
    rows = TOKENS * TOPK
    for at, (name, (hidden, width)) in enumerate(WIDTHS.items()):
        plain, recomputed, first, second = kept[4 * at : 4 * at + 4]
        possible = sum(plain) - sum(recomputed)
        assert sum(plain) - sum(first) >= 0.7 * possible, name
        assert sum(plain) - sum(second) >= 0.9 * possible, name
        dropped = rows * ITEM * (hidden + besides * width)
        assert [a - b for a, b in zip(plain, second, strict=True)] == [dropped] * LAYERS, name
        run = RunConfig(
            model=model_fields(
                {
                    "hidden_size": hidden,
                    "moe_ffn_hidden_size": width,
                    "ffn_hidden_size": None,
                    "gated_linear_unit": True,
                }
            ),
            parallel=parallel_fields(),
        )
        weights = 0 if beside else 4  # float32 probabilities, which gmm saves anyway
        expected = [rows * (hidden * ITEM + weights) * keeps_tokens(run, 1, n) for n in range(4)]
        assert [a - b for a, b in zip(first, second, strict=True)] == expected, name


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("expert_ranks", [1, 2])
@pytest.mark.parametrize("hidden", [8, 64, 100, 300, 1000])
def test_the_share_of_layers_keeps_within_the_rule(
    hidden: int, expert_ranks: int, gated: bool
) -> None:
    run = RunConfig(
        model=model_fields(
            {
                "hidden_size": hidden,
                "moe_ffn_hidden_size": 100,
                "ffn_hidden_size": None,
                "gated_linear_unit": gated,
            }
        ),
        parallel=parallel_fields(),
    )
    least = hidden + (2 if gated else 1) * 100 / expert_ranks
    for layers in range(1, 60):
        keeping = sum(keeps_tokens(run, expert_ranks, at) for at in range(layers))
        assert keeping * hidden <= SHARE * layers * least + 1e-9
        assert keeping == int(kept_share(run, expert_ranks) * layers)
