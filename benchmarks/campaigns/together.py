"""Features together, and alone in every layout: at parity with the plain model on one rank.

Every pair of ours that resolution allows, on the ranks that its exchanges take; every feature alone
in each layout of four layers, with and without full recompute, and beside swap-attention. Forward
and every gradient in float64, then five steps in float32 (``testing.parity``). What a feature
refuses is listed with what it says.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from ascend_run.plugin_api import AscendRunError, Claim, Numerics
from ascend_run.plugin_api.testing.runtime import load_runtime
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.registry.resolution import Resolution, resolve

from .campaign import PASSED, Campaign, Outcome
from .pool_of_ranks import pool

if TYPE_CHECKING:
    from ascend_run.plugin_api.testing.parity import Parity

OPTIONS: Final[Mapping[str, Any]] = {
    "plugins.swap-attention.min_bytes": 1,  # a tiny model's tensors are small
    "plugins.noop-layers.layers": [1],
    "plugins.lora.export": False,
    "plugins.eod-reset.eod_token_id": 1,  # there is no tokenizer
}
"""Options of features under which they do their work on a tiny model."""
CONFIG: Final[Mapping[str, Mapping[str, Any]]] = {
    "alibi": {"model.position_embedding_type": "none"},
    "hybrid-adaptive-cp": {"data.seq_length": 32},  # sixteen parts beside two tensor ranks
    "noop-layers": {"model.num_layers": 3},
    "unaligned-ulysses": {
        "model.num_attention_heads": 6,
        "model.kv_channels": 4,
        "data.seq_length": 18,
    },
}
"""Feature -> what the model must be for it."""
SEQUENCE_RANKS: Final[Mapping[str, int]] = {
    "double-ring": 4,
    "hybrid-adaptive-cp": 4,
    "hybrid-cp": 4,
}
"""Feature -> ranks of the sequence that its exchange within groups and the one between them take;
others take two."""
RECOMPUTED: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
SWAP: Final = "swap-attention"
EXCHANGE: Final = "ulysses"
"""Where the sequence is cut, and the feature under test leaves that to others."""
LAYOUTS: Final[Sequence[tuple[str, Mapping[str, int]]]] = (
    ("dense", {}),
    ("dense", {"dp": 2}),
    ("dense", {"tp": 2}),
    ("dense", {"pp": 2}),
    ("dense", {"pp": 2, "vpp": 2}),
    ("dense", {"cp": 2}),
    ("dense", {"cp": 4}),
    ("dense", {"tp": 2, "cp": 2}),
    ("dense", {"pp": 2, "cp": 2}),
    ("moe", {"dp": 2, "ep": 2}),
    ("moe", {"tp": 2, "dp": 2, "ep": 2}),
    ("moe", {"cp": 2, "ep": 2}),
)
"""Of each feature alone: model and sizes."""


def cases(seed: int) -> Sequence[str]:
    """JSON: plugins, model, layout and config; nothing is drawn."""
    return [json.dumps(case, sort_keys=True) for case in (*_in_pairs(), *_alone())]


def _in_pairs() -> Iterator[dict[str, Any]]:
    for names in allowed_pairs():
        yield {"plugins": names, "model": "moe", "layout": layout_of_pair(names), "config": {}}


def _alone() -> Iterator[dict[str, Any]]:
    for name in features():
        for model, layout in LAYOUTS:
            for others, config in (((), {}), ((), RECOMPUTED), ((SWAP,), {})):
                beside = others + ((EXCHANGE,) if needs_exchange(name, layout) else ())
                if name in beside or _is_without_reference(name, layout):
                    continue
                yield {
                    "plugins": (name,),
                    "beside": beside,
                    "model": model,
                    "layout": layout,
                    "config": {"model.num_layers": 4, **config},
                }


def needs_exchange(name: str, layout: Mapping[str, int]) -> bool:
    """Whether somebody else has to exchange the sequence."""
    resolution = resolution_of((name,))
    return "cp" in layout and not (resolution and Claim.SEQUENCE_EXCHANGE in resolution.owners)


def _is_without_reference(name: str, layout: Mapping[str, int]) -> bool:
    """What changes the model stands on both sides: on one rank they are the same run."""
    return not layout and discover().load([name])[name].manifest.numerics is Numerics.MODEL


def features() -> list[str]:
    """Ours, by name."""
    return ours(Kind.FEATURE)


def ours(kind: Kind) -> list[str]:
    """Plugins of this distribution, by name."""
    catalogue = discover()
    names = (n for n, found in catalogue.items() if found.first_party and found.kind is kind)
    return sorted({plugin.manifest.name for plugin in catalogue.load(names).values()})


@functools.cache
def resolution_of(names: tuple[str, ...]) -> Resolution | None:
    """None where resolution refuses them."""
    try:
        return resolve(names, discover().load(names))
    except AscendRunError:
        return None


def allowed_pairs() -> list[tuple[str, ...]]:
    """Of features of ours."""
    return [pair for pair in combinations(features(), 2) if resolution_of(pair)]


def layout_of_pair(names: tuple[str, ...]) -> dict[str, int]:
    """On as few ranks as have both of them at work."""
    return layout_of(names, 2, cp=max(SEQUENCE_RANKS.get(name, 2) for name in names))


def layout_of(names: tuple[str, ...], ranks: int, cp: int = 2) -> dict[str, int]:
    """Experts spread over two ranks; the sequence where somebody owns its exchange, and tensors
    where somebody owns what linears send. That may take more ranks than are asked for."""
    resolution = resolution_of(names)
    assert resolution is not None
    if ranks == 1:
        return {}
    if Claim.LINEAR_COMM in resolution.owners:
        if Claim.SEQUENCE_EXCHANGE in resolution.owners:
            return {"tp": 2, "cp": cp, "ep": 2}
        return {"tp": 2, "dp": ranks // 2, "ep": 2}
    if Claim.SEQUENCE_EXCHANGE in resolution.owners:
        return {"cp": cp, "dp": max(1, ranks // cp), "ep": 2}
    return {"dp": ranks, "ep": 2}


@functools.cache
def _parity() -> Parity:
    from ascend_run.plugin_api.testing.parity import Parity

    return Parity(pool(), load_runtime().numerics_of)


def run(case: str) -> Outcome:
    """Ask whether it may run; then compare."""
    from ascend_run.plugin_api.testing.parity import Case

    asked = json.loads(case)
    names = (*asked["plugins"], *asked.get("beside", ()))
    settings = {key: value for name in names for key, value in CONFIG.get(name, {}).items()}
    asked["config"] = settings | asked["config"]
    trial = Case(**asked, options=OPTIONS).trial(names, steps=0, sharded=True)
    world_size = Case(**asked).world_size
    problems = load_runtime().examine(trial, world_size).problems
    if problems:
        return {"verdict": PASSED, "refused": "; ".join(problems)}
    _parity()(**asked, options=OPTIONS)
    return {"verdict": PASSED, "compared": True}


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """How much was compared, of which features, and what was refused for which reason."""
    compared: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for case, outcome in outcomes.items():
        if "refused" in outcome:
            refused[outcome["refused"]] += 1
        else:
            compared.update(json.loads(case)["plugins"])
    return {
        "features": features(),
        "pairs": len(allowed_pairs()),
        "compared": sum("compared" in outcome for outcome in outcomes.values()),
        "cases of each feature": dict(sorted(compared.items())),
        "refused": dict(sorted(refused.items())),
    }


CAMPAIGN = Campaign(name="together", seed=0, cases=cases, run=run, figures=figures)
