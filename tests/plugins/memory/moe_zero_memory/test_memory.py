"""What is kept for backward, measured on storages, is what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.memory.moe_zero_memory.kept import SHARE, keeps_tokens, kept_share
from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.support.moe_memory import kept_bytes
from tests.support.needed_plugins import case
from tests.support.tiny_configs import model_fields, parallel_fields

LEVEL: Final = "plugins.moe-zero-memory.level"
TOKENS, TOPK, LAYERS, ITEM = 32, 2, 4, 2
PAGE: Final = Path(__file__).parents[4] / "docs/plugins/memory/moe-zero-memory.md"
WIDTHS: Final = {
    "Mixtral 8x7B": (256, 896),
    "gpt-oss": (176, 176),
    "Qwen2 57B-A14B": (224, 160),
    "Qwen3 235B-A22B": (256, 96),
    "DeepSeek-V2": (320, 96),
    "DeepSeek-V3": (448, 128),
}
"""H and F of models, a sixteenth of them."""
BUILT_IN, GROUPED = 5, 3
"""Values of F that experts save besides their tokens: built-in ones, and those of gmm."""
EP: Final = {"parallel.expert_model_parallel_size": 2}
EXPERT_TP: Final = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "parallel.expert_tensor_parallel_size": 2,
}


def run_config(hidden: int, width: int, *, gated: bool = True) -> RunConfig:
    model = {
        "hidden_size": hidden,
        "moe_ffn_hidden_size": width,
        "ffn_hidden_size": None,
        "gated_linear_unit": gated,
    }
    return RunConfig(model=model_fields(model), parallel=parallel_fields())


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
    [((), BUILT_IN), case(("gmm",), GROUPED)],
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
        run = run_config(hidden, width)
        weights = 0 if beside else 4  # float32 probabilities, which gmm saves anyway
        expected = [rows * (hidden * ITEM + weights) * keeps_tokens(run, 1, n) for n in range(4)]
        assert [a - b for a, b in zip(first, second, strict=True)] == expected, name


@pytest.mark.exhaustive(by=lambda layout: ())
@pytest.mark.parametrize(("layout", "share"), [(EP, 1), (EXPERT_TP, 2)], ids=["ep", "expert tp"])
def test_levels_save_as_much_on_two_ranks(
    gloo_pool: GlooPool, layout: dict[str, Any], share: int
) -> None:
    """Together on both, since the routing decides how much each saves: every token of both has two
    experts, on one rank each or on both, which then have half of an expert's width."""
    hidden, width = WIDTHS["gpt-oss"]
    values = config(hidden, width, **layout)
    plugins = ("moe-zero-memory",)
    runs = [((), values), *((plugins, {**values, LEVEL: level}) for level in (0, 1))]
    kept = gloo_pool.run(kept_bytes, 2, runs)
    rows, run = 2 * TOKENS * TOPK, run_config(hidden, width)
    for layer in range(LAYERS):
        plain, first, second = (sum(rank[at][layer] for rank in kept) for at in range(3))
        assert plain - second == rows * ITEM * (share * hidden + BUILT_IN * width)
        keeps = keeps_tokens(run, share, layer)
        assert first - second == keeps * rows * share * (hidden * ITEM + 4)


def test_the_page_has_the_counts_and_their_percentages() -> None:
    """Those of the tests above, with ``kept_share`` in place of the layers that it chooses."""
    page = PAGE.read_text()
    assert f"| without the plugin | H + {BUILT_IN} F | H + {GROUPED} F |" in page
    lines = [
        line for line in page.splitlines() if line.startswith(tuple(f"| {n} " for n in WIDTHS))
    ]
    for line, (name, (hidden, width)) in zip(lines, WIDTHS.items(), strict=True):
        share = kept_share(run_config(hidden, width), 1)
        saved = [1 - share * hidden / (hidden + besides * width) for besides in (BUILT_IN, GROUPED)]
        layers = "all" if share == 1 else percent(share)
        cells = [name, f"{hidden / width:.3g}", layers, *map(percent, saved)]
        assert line == f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    return f"{int(100 * share + 0.5)} %"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("expert_ranks", [1, 2])
@pytest.mark.parametrize("hidden", [8, 64, 100, 300, 1000])
def test_the_share_of_layers_keeps_within_the_rule(
    hidden: int, expert_ranks: int, gated: bool
) -> None:
    run = run_config(hidden, 100, gated=gated)
    least = hidden + (2 if gated else 1) * 100 / expert_ranks
    for layers in range(1, 60):
        keeping = sum(keeps_tokens(run, expert_ranks, at) for at in range(layers))
        assert keeping * hidden <= SHARE * layers * least + 1e-9
        assert keeping == int(kept_share(run, expert_ranks) * layers)
