"""The runs that ``memory_prediction`` measures: the examples, and two small models in layouts."""

from __future__ import annotations

from typing import Final

from ascend_run.prepare.config.reading import read_raw

from .memory_case import BATCH, CP, EP, EXAMPLES, PP, SP, SPREAD, SWAP, TP, VPP, Case
from .memory_plugins import PLUGIN_CASES

_MODEL_SECTIONS: Final = ("model.", "parallel.", "train.", "optimizer.", "ddp.", "plugins.")
_FULL: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 2,
}
_GATHER: Final = {"model.moe_token_dispatcher_type": "allgather"}


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


CASES: Final = (
    _example("dense"),
    _example("demo"),
    Case(name="dense"),
    Case(name="dense, fp32, 4 micro-batches", values={**BATCH, "train.precision": "fp32"}),
    Case(name="tp 2", ranks=2, values=TP),
    Case(name="tp 2, sequence parallel", ranks=2, values=SP),
    Case(name="pp 2", ranks=2, values=PP),
    Case(
        name="pp 2, vpp 2",
        ranks=2,
        values=VPP,
    ),
    Case(name="dp 2", ranks=2, values=BATCH),
    Case(name="dp 4, distributed optimizer", ranks=4, values={**BATCH, **SPREAD}),
    Case(name="cp 2, ulysses", ranks=2, plugins=("ulysses",), values=CP),
    Case(
        name="cp 4, ulysses, repeated heads",
        ranks=4,
        plugins=("ulysses",),
        values={"parallel.context_parallel_size": 4, "model.num_query_groups": 2},
    ),
    Case(name="cp 2, ring-attention", ranks=2, plugins=("ring-attention",), values=CP),
    Case(name="full recompute", values=_FULL),
    Case(
        name="selective recompute of the feed-forward",
        values={"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]},
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
        values={**CP, "model.attention_dropout": 0.1},
    ),
    Case(
        name="fp32, matmuls by oneDNN",
        values={"train.precision": "fp32", "plugins.cpu.fp32_matmul_library": "onednn"},
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
    Case(name="pp 2, matmul-add", ranks=2, plugins=("matmul-add",), values=PP),
    Case(
        name="tp 2, sequence parallel, coc, matmul-add",
        ranks=2,
        plugins=("coc", "matmul-add"),
        values=SP,
    ),
    Case(name="lora", plugins=("lora",)),
    Case(name="lora, gmm", model="moe", plugins=("lora", "gmm")),
    Case(name="lora, qlora", plugins=("lora", "qlora")),
    Case(
        name="lora, qlora, tp 2, sequence parallel, single quantisation",
        ranks=2,
        plugins=("lora", "qlora"),
        values={**SP, "plugins.qlora.use_double_quant": False},
    ),
    Case(
        name="lora on queries, tp 2, sequence parallel",
        ranks=2,
        plugins=("lora",),
        values={**SP, "plugins.lora.target_modules": ["linear_q"]},
    ),
    Case(
        name="the demo's plugins: cp 2, ulysses, gmm, swap-attention",
        model="moe",
        ranks=2,
        plugins=("ulysses", "gmm", "swap-attention"),
        values={**CP, **SWAP},
    ),
    Case(name="experts in a loop", model="moe"),
    Case(name="ep 2", model="moe", ranks=2, values={**EP, **BATCH}),
    Case(name="ep 2, pp 2, gmm", model="moe", ranks=4, plugins=("gmm",), values={**EP, **PP}),
    Case(
        name="tp 2, expert tp 2, dp 2",
        model="moe",
        ranks=4,
        values={**SP, **BATCH, "parallel.expert_tensor_parallel_size": 2},
    ),
    Case(
        name="tp 2, expert tp 2, ep 2",
        model="moe",
        ranks=4,
        values={**SP, **EP, **BATCH, "parallel.expert_tensor_parallel_size": 2},
    ),
    Case(
        name="tp 2, ep 2, distributed optimizer",
        model="moe",
        ranks=4,
        values={**SP, **EP, **BATCH, **SPREAD},
    ),
    Case(name="ep 2, all-gather", model="moe", ranks=2, values={**EP, **_GATHER, **BATCH}),
    Case(
        name="tp 2, ep 2, all-gather, dp 2",
        model="moe",
        ranks=4,
        plugins=("gmm",),
        values={**SP, **EP, **_GATHER, **BATCH},
    ),
    Case(name="dpo", reads_pairs=True),
    Case(name="dpo, 16 micro-batches", reads_pairs=True, values=BATCH),
    Case(name="dpo, tp 2, sequence parallel", reads_pairs=True, ranks=2, values=SP),
    Case(name="dpo, pp 2", reads_pairs=True, ranks=2, values=PP),
    *PLUGIN_CASES,
)
