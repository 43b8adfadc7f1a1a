"""The runs that ``memory_prediction`` measures: the examples, and two small models in layouts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.prepare.config.reading import read_raw

EXAMPLES: Final = Path(__file__).parent.parent / "examples"
_MODEL_SECTIONS: Final = ("model.", "parallel.", "train.", "optimizer.", "ddp.", "plugins.")

_DENSE: Final[Mapping[str, Any]] = {
    "model.family": "llama",
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 176,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 4,
    "model.vocab_size": 512,
    "model.make_vocab_size_divisible_by": 64,
    "data.seq_length": 128,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 4,
    "train.precision": "bf16",
    "train.train_iters": 5,
    "optimizer.lr": 1e-3,
    "run.seed": 17,
}
_MOE: Final[Mapping[str, Any]] = {
    **_DENSE,
    "model.family": "mixtral",
    "model.ffn_hidden_size": 128,
    "model.moe_ffn_hidden_size": 128,
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_aux_loss_coeff": 0.01,
}
_UNTIMED: Final = {
    "plugins.cpu.bf16_matmul_dtype": "bf16",
    "plugins.cpu.bf16_attention_dtype": "bf16",
    "plugins.cpu.fp32_matmul_library": "torch",
}
"""By default each processor times them, and copies of operands would be in some results."""
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {"dense": _DENSE, "moe": _MOE}
"""The shapes of examples/dense.toml and examples/demo.toml, made smaller by the same factor."""


@attrs.frozen(kw_only=True)
class Case:
    """One run on one to four ranks."""

    name: str
    model: str = "dense"
    """One of ``MODELS``, or the example whose values these are."""
    ranks: int = 1
    plugins: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {**_UNTIMED, **MODELS.get(self.model, {}), **self.values}


def _example(name: str) -> Case:
    """A run of one of the examples: its model, batch, layout and features."""
    raw = read_raw(EXAMPLES / f"{name}.toml", ())
    given = {key: value.value for key, value in raw.values.items()}
    values = {key: v for key, v in given.items() if key.startswith(_MODEL_SECTIONS)}
    return Case(
        name=f"examples/{name}.toml",
        model=name,
        ranks=raw.nproc,
        plugins=tuple(raw.enable),
        values={
            **values,
            "data.seq_length": given["data.seq_length"],
            "train.eval_interval": 0,  # the batches are made here
        },
    )


_TP: Final = {"parallel.tensor_model_parallel_size": 2}
_SP: Final = {**_TP, "parallel.sequence_parallel": True}
_PP: Final = {"parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 16}
_CP: Final = {"parallel.context_parallel_size": 2}
_EP: Final = {"parallel.expert_model_parallel_size": 2}
_BATCH: Final = {"train.global_batch_size": 16}
_SPREAD: Final = {"ddp.use_distributed_optimizer": True}
_FULL: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 2,
}
_GATHER: Final = {"model.moe_token_dispatcher_type": "allgather"}
_SWAP: Final = {"plugins.swap-attention.min_bytes": 1024}
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

CASES: Final = (
    _example("dense"),
    _example("demo"),
    Case(name="dense"),
    Case(name="dense, fp32, 4 micro-batches", values={**_BATCH, "train.precision": "fp32"}),
    Case(name="tp 2", ranks=2, values=_TP),
    Case(name="tp 2, sequence parallel", ranks=2, values=_SP),
    Case(name="pp 2", ranks=2, values=_PP),
    Case(
        name="pp 2, vpp 2",
        ranks=2,
        values={**_PP, "parallel.virtual_pipeline_model_parallel_size": 2},
    ),
    Case(name="dp 2", ranks=2, values=_BATCH),
    Case(name="dp 4, distributed optimizer", ranks=4, values={**_BATCH, **_SPREAD}),
    Case(name="cp 2, ulysses", ranks=2, plugins=("ulysses",), values=_CP),
    Case(
        name="cp 4, ulysses, repeated heads",
        ranks=4,
        plugins=("ulysses",),
        values={"parallel.context_parallel_size": 4, "model.num_query_groups": 2},
    ),
    Case(name="cp 2, ring-attention", ranks=2, plugins=("ring-attention",), values=_CP),
    Case(name="full recompute", values=_FULL),
    Case(
        name="selective recompute of the feed-forward",
        values={"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]},
    ),
    Case(name="swap-attention", plugins=("swap-attention",), values=_SWAP),
    Case(
        name="swap-attention, in files",
        plugins=("swap-attention",),
        values={**_SWAP, "plugins.swap-attention.folder": _FOLDER},
    ),
    Case(name="smart-swap", plugins=("smart-swap",), values=_SMART),
    Case(
        name="tp 2, sequence parallel, smart-swap within 1.5 MiB",
        ranks=2,
        plugins=("smart-swap",),
        values={**_SP, **_SMART, "plugins.smart-swap.activation_mb": 1.5},
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
        values={**_BATCH, **_SPREAD, **_BUCKETS, "plugins.swap-optimizer.folder": _FOLDER},
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
            **_PP,
            "plugins.virtual-optimizer.size": ["all", 0],
            "plugins.virtual-optimizer.folder": _FOLDER,
        },
    ),
    Case(name="recompute-activation", plugins=("recompute-activation",)),
    Case(name="recompute-norm", plugins=("recompute-norm",)),
    Case(
        name="recompute-activation, recompute-norm, swap-attention",
        plugins=("recompute-activation", "recompute-norm", "swap-attention"),
        values=_SWAP,
    ),
    Case(
        name="pp 2, vpp 2, recompute of 1 layer, recompute-activation",
        ranks=2,
        plugins=("recompute", "recompute-activation"),
        values={
            **_PP,
            "parallel.virtual_pipeline_model_parallel_size": 2,
            "plugins.recompute.num_layers": 1,
        },
    ),
    Case(
        name="attention in blocks",
        plugins=("flash-attention",),
        values={"plugins.flash-attention.kernel": "blocks"},
    ),
    Case(
        name="alibi, two blocks, fp32",
        plugins=("alibi",),
        values={
            "model.position_embedding_type": "none",
            "data.seq_length": 512,
            "train.micro_batch_size": 1,
            "train.precision": "fp32",
        },
    ),
    Case(
        name="cp 2, ulysses, dropout in the attention",
        ranks=2,
        plugins=("ulysses",),
        values={**_CP, "model.attention_dropout": 0.1},
    ),
    Case(name="matmuls in fp32", values={"plugins.cpu.bf16_matmul_dtype": "fp32"}),
    Case(
        name="backward of the attention in fp32",
        values={"plugins.cpu.bf16_attention_dtype": "fp32"},
    ),
    Case(
        name="rms-norm by its formula",
        plugins=("rms-norm",),
        values={"plugins.rms-norm.kernel": "torch"},
    ),
    Case(name="pp 2, matmul-add", ranks=2, plugins=("matmul-add",), values=_PP),
    Case(
        name="tp 2, sequence parallel, coc, matmul-add",
        ranks=2,
        plugins=("coc", "matmul-add"),
        values=_SP,
    ),
    Case(name="lora", plugins=("lora",)),
    Case(name="lora, gmm", model="moe", plugins=("lora", "gmm")),
    Case(
        name="lora on queries, tp 2, sequence parallel",
        ranks=2,
        plugins=("lora",),
        values={**_SP, "plugins.lora.target_modules": ["linear_q"]},
    ),
    Case(
        name="the demo's plugins: cp 2, ulysses, gmm, swap-attention",
        model="moe",
        ranks=2,
        plugins=("ulysses", "gmm", "swap-attention"),
        values={**_CP, **_SWAP},
    ),
    Case(name="experts in a loop", model="moe"),
    Case(name="ep 2", model="moe", ranks=2, values={**_EP, **_BATCH}),
    Case(name="ep 2, pp 2, gmm", model="moe", ranks=4, plugins=("gmm",), values={**_EP, **_PP}),
    Case(
        name="tp 2, expert tp 2, dp 2",
        model="moe",
        ranks=4,
        values={**_SP, **_BATCH, "parallel.expert_tensor_parallel_size": 2},
    ),
    Case(
        name="tp 2, expert tp 2, ep 2",
        model="moe",
        ranks=4,
        values={**_SP, **_EP, **_BATCH, "parallel.expert_tensor_parallel_size": 2},
    ),
    Case(
        name="tp 2, ep 2, distributed optimizer",
        model="moe",
        ranks=4,
        values={**_SP, **_EP, **_BATCH, **_SPREAD},
    ),
    Case(name="ep 2, all-gather", model="moe", ranks=2, values={**_EP, **_GATHER, **_BATCH}),
    Case(
        name="tp 2, ep 2, all-gather, dp 2",
        model="moe",
        ranks=4,
        plugins=("gmm",),
        values={**_SP, **_EP, **_GATHER, **_BATCH},
    ),
)
