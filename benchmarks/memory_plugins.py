"""The runs in which each plugin of memory, and each optimizer, has work to do."""

from __future__ import annotations

import tempfile
from typing import Any, Final

from .memory_case import BATCH, EP, PP, SP, SPREAD, SWAP, TP, VPP, Case

_SMART: Final = {
    "plugins.smart-swap.min_bytes": 1024,
    "plugins.smart-swap.warmup_steps": 0,
    "plugins.smart-swap.bandwidth_gb": 1e6,
}
"""Copies over such a link are complete at the next event, so that what is chosen follows from the
order of the events, whatever their times."""
_BUCKETS: Final = {"plugins.swap-optimizer.bucket_size": 20_000}
_FOLDER: Final = tempfile.gettempdir()
"""Of files, which have no names. Their bytes are the same on a disk and in memory."""


def _within(activation_mb: float) -> dict[str, Any]:
    """Return options of adaptive-recompute with a budget, chosen after one step."""
    options = {"activation_mb": activation_mb, "profiled_steps": 1}
    return {f"plugins.adaptive-recompute.{name}": value for name, value in options.items()}


PLUGIN_CASES: Final = (
    Case(name="swap-attention", plugins=("swap-attention",), values=SWAP),
    Case(
        name="swap-attention, in files",
        plugins=("swap-attention",),
        values={**SWAP, "plugins.swap-attention.folder": _FOLDER},
    ),
    Case(name="smart-swap", plugins=("smart-swap",), values=_SMART),
    Case(
        name="tp 2, sequence parallel, smart-swap within 1.5 MiB",
        ranks=2,
        plugins=("smart-swap",),
        values={**SP, **_SMART, "plugins.smart-swap.activation_mb": 1.5},
    ),
    Case(name="pp 2, smart-swap", ranks=2, plugins=("smart-swap",), values={**PP, **_SMART}),
    Case(
        name="pp 2, vpp 2, smart-swap", ranks=2, plugins=("smart-swap",), values={**VPP, **_SMART}
    ),
    *(
        Case(
            name=f"{layout}, smart-swap over {speed} GB/s",
            ranks=2,
            plugins=("smart-swap",),
            values={**values, **_SMART, "plugins.smart-swap.bandwidth_gb": float(speed)},
            memory_gb=10.0,
        )
        for layout, values, speed in (("pp 2", PP, 3), ("pp 2", PP, 1), ("pp 2, vpp 2", VPP, 1))
    ),
    Case(
        name="pp 2, adaptive-recompute within 3 MiB",  # of which a whole part leaves some unused
        ranks=2,
        plugins=("adaptive-recompute",),
        values={**PP, **_within(3)},
    ),
    Case(
        name="pp 2, vpp 2, adaptive-recompute within 1000 MiB",
        ranks=2,
        plugins=("adaptive-recompute",),
        values={**VPP, **_within(1000)},
    ),
    Case(name="reuse-fp32-param", plugins=("reuse-fp32-param",)),
    Case(
        name="dp 2, distributed optimizer, reuse-fp32-param",
        ranks=2,
        plugins=("reuse-fp32-param",),
        values={**BATCH, **SPREAD},
    ),
    Case(name="ema-adamw", plugins=("ema-adamw",)),
    Case(name="o2-bf16-optimizer", plugins=("o2-bf16-optimizer",)),
    Case(name="low-precision-optimizer", plugins=("low-precision-optimizer",)),
    Case(
        name="dp 2, distributed optimizer, low-precision-optimizer",
        ranks=2,
        plugins=("low-precision-optimizer",),
        values={**BATCH, **SPREAD},
    ),
    Case(name="muon", plugins=("muon",)),
    Case(name="tp 2, sequence parallel, muon", ranks=2, plugins=("muon",), values=SP),
    Case(name="memory-fragmentation", plugins=("memory-fragmentation",)),
    Case(
        name="tp 2, sequence parallel, comm-buffer-auto",
        ranks=2,
        plugins=("comm-buffer-auto",),
        values=SP,
    ),
    Case(name="swap-optimizer", plugins=("swap-optimizer",), values=_BUCKETS),
    Case(
        name="swap-optimizer, in files",
        plugins=("swap-optimizer",),
        values={**_BUCKETS, "plugins.swap-optimizer.folder": _FOLDER},
    ),
    Case(
        name="dp 2, distributed optimizer, swap-optimizer, in files",
        ranks=2,
        plugins=("swap-optimizer",),
        values={**BATCH, **SPREAD, **_BUCKETS, "plugins.swap-optimizer.folder": _FOLDER},
    ),
    Case(name="virtual-optimizer", plugins=("virtual-optimizer",)),
    Case(
        name="virtual-optimizer, in files",
        plugins=("virtual-optimizer",),
        values={"plugins.virtual-optimizer.folder": _FOLDER},
    ),
    Case(
        name="pp 2, virtual-optimizer of one stage, in files",
        ranks=2,
        plugins=("virtual-optimizer",),
        values={
            **PP,
            "plugins.virtual-optimizer.size": ["all", 0],
            "plugins.virtual-optimizer.folder": _FOLDER,
        },
    ),
    Case(name="recompute-activation", plugins=("recompute-activation",)),
    Case(name="recompute-norm", plugins=("recompute-norm",)),
    Case(
        name="recompute-activation, recompute-norm, swap-attention",
        plugins=("recompute-activation", "recompute-norm", "swap-attention"),
        values=SWAP,
    ),
    Case(
        name="pp 2, vpp 2, recompute of 1 layer, recompute-activation",
        ranks=2,
        plugins=("recompute", "recompute-activation"),
        values={**VPP, "plugins.recompute.num_layers": 1},
    ),
    Case(
        name="tp 2, recompute, recompute-comm-opt",
        ranks=2,
        plugins=("recompute", "recompute-comm-opt"),
        values=TP,
    ),
    Case(
        name="tp 2, sequence parallel, recompute, recompute-comm-opt at level 2",
        ranks=2,
        plugins=("recompute", "recompute-comm-opt"),
        values={**SP, "plugins.recompute-comm-opt.level": 2},
    ),
    Case(
        name="pp 2, vpp 2, recompute-in-bubble",
        ranks=2,
        plugins=("recompute-in-bubble",),
        values={**VPP, "plugins.recompute-in-bubble.num_forwards": 2},
    ),
    Case(
        name="pp 2, vpp 2, recompute, recompute-in-advance",
        ranks=2,
        plugins=("recompute", "recompute-in-advance"),
        values={**VPP, "model.num_layers": 8},
    ),
    Case(name="moe-zero-memory", model="moe", plugins=("moe-zero-memory",)),
    Case(
        name="ep 2, gmm, moe-zero-memory without tokens",
        model="moe",
        ranks=2,
        plugins=("gmm", "moe-zero-memory"),
        values={**EP, **BATCH, "plugins.moe-zero-memory.level": 1},
    ),
    Case(
        name="moe-adaptive-recompute",
        model="moe",
        plugins=("moe-adaptive-recompute",),
        values={"plugins.moe-adaptive-recompute.scale": 0.5},
    ),
)
