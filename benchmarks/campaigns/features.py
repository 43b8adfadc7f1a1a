"""Features of this distribution: which go together, and under which options each has work to do
in a tiny model."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from ascend_run.plugin_api import AscendRunError, Claim, Numerics
from ascend_run.registry.discovery import Catalogue, discover
from ascend_run.registry.kinds import Kind
from ascend_run.registry.resolution import Resolution, resolve

OPTIONS: Final[Mapping[str, Any]] = {
    "plugins.adaptive-recompute.activation_mb": 0.02,  # less than a tiny model keeps
    "plugins.adaptive-recompute.profiled_steps": 1,
    "plugins.swap-attention.min_bytes": 1,  # a tiny model's tensors are small
    "plugins.moe-adaptive-recompute.scale": 0.5,  # and its routing is balanced
    "plugins.memory-timeline.min_bytes": 1,
    "plugins.eval-generate.prompt_ids": [[3, 1, 4], [2]],  # there is no tokenizer
    "plugins.eval-generate.interval": 1,
    "plugins.eval-generate.max_new_tokens": 3,
    "plugins.hot-experts.num_experts": 2,  # all of a rank's
    "plugins.noop-layers.layers": [1],
    "plugins.o2-bf16-optimizer.stochastic_rounding": False,  # rounding errors draw other numbers
    "plugins.recompute.num_layers": 1,  # others have the rest of the layers
    "plugins.recompute-comm-opt.level": 2,  # both sums of a layer
    "plugins.recompute-in-bubble.num_forwards": 2,  # a tiny batch has few in flight
    "plugins.lora.export": False,
    "plugins.muon.ns_dtype": "float32",  # rounding errors of bfloat16 depend on the layout
    # Blocks that the layouts do not cut, as ranks quantise their shards.
    "plugins.qlora.blocksize": 32,
    "plugins.qlora.use_double_quant": False,
    "plugins.reuse-fp32-param.bucket_size": 1000,
    "plugins.smart-swap.bandwidth_gb": 1e6,  # a tiny model computes for microseconds
    "plugins.smart-swap.min_bytes": 1,
    "plugins.smart-swap.warmup_steps": 0,
    "plugins.swap-optimizer.bucket_size": 1000,
    "plugins.eod-reset.eod_token_id": 1,  # there is no tokenizer
}
"""Options of features under which they do their work on a tiny model."""
IN_SETS: Final[Mapping[str, Any]] = {
    **OPTIONS,
    "plugins.virtual-optimizer.folder": ".",  # the CPU's memory is left for files without names
}
"""Options of features where sets of them run together."""
CONFIG: Final[Mapping[str, Mapping[str, Any]]] = {
    "alibi": {"model.position_embedding_type": "none"},
    "hybrid-adaptive-cp": {"data.seq_length": 32},  # sixteen parts beside two tensor ranks
    "moe-allgather": {"model.moe_token_dispatcher_type": "allgather"},
    "moe-bmm-fused": {  # padded to all tokens, so that none is dropped in any layout
        "model.moe_expert_capacity_factor": 1.99,
        "model.moe_pad_expert_input_to_capacity": True,
    },
    "noop-layers": {"model.num_layers": 3},
    # Moments round to another neighbour, or in other blocks, in another layout. At these rates that
    # stays below the tolerance, and a lost moment does not.
    "low-precision-optimizer": {"optimizer.lr": 5e-6},
    "o2-bf16-optimizer": {"optimizer.lr": 1e-4},
    "qlora": {"model.hidden_size": 64, "model.ffn_hidden_size": 64},  # of whole blocks
    "unaligned-ulysses": {
        "model.num_attention_heads": 6,
        "model.kv_channels": 4,
        "data.seq_length": 18,
    },
}
"""Feature -> what the model must be for it."""
BESIDE: Final[Mapping[frozenset[str], Mapping[str, Any]]] = {
    frozenset({"qlora", "shared-experts"}): {"plugins.shared-experts.count": 8},  # whole blocks
    frozenset({"qlora", "unaligned-ulysses"}): {"model.kv_channels": 32},
    # An adapter's second matrix starts at zero, so at any rate it moves by as much as it is.
    frozenset({"lora", "low-precision-optimizer"}): {
        "plugins.low-precision-optimizer.float32": ["lora_B"],
    },
    frozenset({"lora", "o2-bf16-optimizer"}): {
        "optimizer.lr": 0.1,
        "optimizer.adam_beta1": 0.0,
        "optimizer.adam_eps": 1.0,
    },
}
"""Two features -> what the run must be for both."""
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
    ("moe", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}),
)
"""Every kind of layout: model and sizes."""
EXCHANGE: Final = "ulysses"
"""Where the sequence is split, and the feature under test leaves that to others."""


LATER: Final[Sequence[str]] = ("eval-generate",)
"""Features and tasks that came after the last runs of the campaigns of sets, and join them with the
next ones. Until then their own suites show what these would."""
YOUNGER: Final[Sequence[Sequence[str]]] = (("cc-lora", "qlora"), ("fused-mlp",))
"""Features that came after the sets of the campaign ``together`` were drawn, in the order in which
they came: the pairs of each group are in sets of their own, and the others stay as they are. Empty
where all are to be drawn again."""


@functools.cache
def catalogue() -> Catalogue:
    """Return the installed plugins; read once, as it takes longer than examining a set."""
    return discover()


@functools.cache
def features() -> tuple[str, ...]:
    """Return the names of the built-in features."""
    return tuple(ours(Kind.FEATURE))


@functools.cache
def settled(kind: Kind = Kind.FEATURE) -> tuple[str, ...]:
    """Return those of a kind over which the campaigns of sets run."""
    return tuple(name for name in ours(kind) if name not in LATER)


@functools.cache
def generations() -> tuple[tuple[str, ...], ...]:
    """Return the features of the campaigns without ``YOUNGER``, then with its first group, and so
    on; the last one holds all."""
    younger = [{*chain(*YOUNGER[count:])} for count in range(len(YOUNGER) + 1)]
    return tuple(tuple(name for name in settled() if name not in left) for left in younger)


def ours(kind: Kind) -> list[str]:
    """Return the names of the built-in plugins of a kind."""
    names = (n for n, found in catalogue().items() if found.first_party and found.kind is kind)
    return sorted({plugin.manifest.name for plugin in catalogue().load(names).values()})


@functools.cache
def resolution_of(names: tuple[str, ...]) -> Resolution | None:
    """Resolve a set; None if it is refused."""
    try:
        return resolve(names, catalogue().load(names))
    except AscendRunError:
        return None


@functools.cache
def numerics_of(name: str) -> Numerics:
    """Return the numerics that a plugin's manifest declares."""
    numerics: Numerics = catalogue().load([name])[name].manifest.numerics
    return numerics


def config_of(names: Sequence[str]) -> dict[str, Any]:
    """Return what the model must be for a set of features."""
    both = (config for pair, config in BESIDE.items() if pair <= {*names})
    return dict(ChainMap(*both, *(CONFIG.get(name, {}) for name in reversed(names))))


def exchanges(names: Sequence[str]) -> bool:
    """Return whether one of the features exchanges the sequence between ranks."""
    resolution = resolution_of(tuple(names))
    return resolution is not None and Claim.CONTEXT_PARALLEL in resolution.owners


def needs_exchange(name: str, layout: Mapping[str, int]) -> bool:
    """Return whether another feature has to exchange the sequence."""
    return "cp" in layout and not exchanges((name,))


def layout_of(names: tuple[str, ...], ranks: int) -> dict[str, int]:
    """Return a layout in which a set has work to do: experts spread over two ranks; the sequence
    split where a feature exchanges it, and tensors where one owns the collectives of linears. That
    may take more ranks than are asked for."""
    resolution = resolution_of(names)
    assert resolution is not None
    if ranks == 1:
        return {}
    if Claim.LINEAR_COMM in resolution.owners:
        if Claim.CONTEXT_PARALLEL in resolution.owners:
            return {"tp": 2, "cp": 2, "ep": 2}
        return {"tp": 2, "dp": ranks // 2, "ep": 2}
    if Claim.CONTEXT_PARALLEL in resolution.owners:
        return {"cp": 2, "dp": max(1, ranks // 2), "ep": 2}
    return {"dp": ranks, "ep": 2}
