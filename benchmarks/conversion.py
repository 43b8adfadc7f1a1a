"""Time and memory to convert a checkpoint, against a plain copy of the same files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .protocol import Benchmark, NotMeasured, Settings, alternating, device, worker
from .rows import Row, bounded, compared

GOAL: Final = 0.5
"""A conversion takes at most twice as long as a copy; the aim is 1.3 times."""
MEMORY_GOAL: Final = 1.0
"""Peak memory at most one file of the source."""
_HIDDEN, _FFN, _LAYERS, _VOCABULARY = 1024, 2816, 20, 8_000
NUM_FILES: Final = 4


@attrs.frozen
class _Way:
    """A conversion: from the format in a folder, to another."""

    source: str
    target: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"convert, {self.source} to {self.target} vs a copy of the files"


WAYS: Final = (
    _Way("hf", "mp-rank", ("--to", "mp-rank", "--tp", "2", "--pp", "2")),
    _Way("mp-rank", "hf", ("--to", "hf")),
    _Way("hf", "ascend-run", ("--to", "ascend-run")),
)
MEMORY_ROW: Final = "convert, peak memory of the three ways"


def benchmarks() -> list[Benchmark]:
    """One row of time for each way, and one of memory."""
    timed = [Benchmark(name=way.name, goal=f">= {GOAL:g} x", measure=_measure(way)) for way in WAYS]
    memory = Benchmark(name=MEMORY_ROW, goal=f"<= {MEMORY_GOAL:g} shards", measure=_measure_memory)
    return [*timed, memory]


def _measure(way: _Way) -> Any:
    def measure(settings: Settings) -> Row:
        with tempfile.TemporaryDirectory() as name:
            source = _source_of(way, Path(name))
            ours, peer = alternating(
                settings,
                lambda: _convert(way, source)["seconds"],
                lambda: worker("conversion_worker", "copy", source)["seconds"],
                way.name,
            )
            size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        return compared(
            name=way.name,
            ours=ours,
            peer=peer,
            unit="s",
            goal=GOAL,
            note=f"{size / 1e6:,.0f} MB of bf16, without imports; both flush the files to the disk",
            device=device(),
            larger_is_better=False,
        )

    return measure


def _measure_memory(settings: Settings) -> Row:
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        shard = 0
        for way in WAYS:
            folder = Path(name, way.target)
            folder.mkdir()
            source = _source_of(way, folder)
            settings.report(f"{MEMORY_ROW}: {way.source} to {way.target}")
            shard = max(file.stat().st_size for file in source.rglob("*") if file.is_file())
            peak = _convert(way, source, "peak")["peak_bytes"]
            peaks[f"{way.source} to {way.target}"] = peak / shard
    each = ", ".join(f"{way} {peak:.2f}" for way, peak in peaks.items())
    return bounded(
        name=MEMORY_ROW,
        value=max(peaks.values()),
        unit="shards",
        limit=MEMORY_GOAL,
        note=f"{each}; anonymous resident memory beyond that before, over the largest file read",
        device=device(),
    )


def _convert(way: _Way, source: Path, job: str = "convert") -> dict[str, Any]:
    found = worker("conversion_worker", job, source, *way.words)
    if found["exit_code"]:
        raise NotMeasured(f"convert exited with {found['exit_code']}")
    return found


def _source_of(way: _Way, folder: Path) -> Path:
    """Write the source of a way; return its folder."""
    write_model(folder / "hf")
    if way.source == "hf":
        return folder / "hf"
    (to_source,) = (one for one in WAYS if one.target == way.source)
    words = ("keep", folder / "hf", folder / way.source, *to_source.words)
    if worker("conversion_worker", *words)["exit_code"]:
        raise NotMeasured(f"the {way.source} files could not be written")
    return folder / way.source


def write_model(folder: Path) -> None:
    """Write a Llama of random bf16 weights in several files."""
    import torch
    from safetensors.torch import save_file
    from torch import Tensor

    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    files: list[dict[str, Tensor]] = [{} for _ in range(NUM_FILES)]
    files[0]["model.embed_tokens.weight"] = weight(_VOCABULARY, _HIDDEN)
    files[-1] |= {
        "model.norm.weight": weight(_HIDDEN), "lm_head.weight": weight(_VOCABULARY, _HIDDEN)
    }  # fmt: skip
    for layer in range(_LAYERS):
        for name, shape in _LAYER:
            at = f"model.layers.{layer}.{name}.weight"
            files[layer * NUM_FILES // _LAYERS][at] = weight(*shape)
    folder.mkdir()
    names: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_CONFIG))


_LAYER: Final[Sequence[tuple[str, tuple[int, ...]]]] = (
    ("input_layernorm", (_HIDDEN,)),
    ("post_attention_layernorm", (_HIDDEN,)),
    ("self_attn.q_proj", (_HIDDEN, _HIDDEN)),
    ("self_attn.k_proj", (_HIDDEN // 4, _HIDDEN)),
    ("self_attn.v_proj", (_HIDDEN // 4, _HIDDEN)),
    ("self_attn.o_proj", (_HIDDEN, _HIDDEN)),
    ("mlp.gate_proj", (_FFN, _HIDDEN)),
    ("mlp.up_proj", (_FFN, _HIDDEN)),
    ("mlp.down_proj", (_HIDDEN, _FFN)),
)
_CONFIG: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _FFN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
