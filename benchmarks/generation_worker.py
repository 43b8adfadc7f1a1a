"""Generate with one system in a fresh process; prints one JSON line.

All systems have the weights of ``llama.weights``, the same prompts, and the same lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .llama import Shape
from .peer_weights import litgpt_weights, transformers_weights

SHAPE: Final = Shape(
    layers=8, hidden=512, ffn=1408, heads=8, vocab=8192, seq_length=1024, micro_batch=1
)
FIRST_TOKENS: Final = 512
PAGE: Final = 16
"""Tokens of a page of our cache."""
Request = tuple[list[int], int]
"""A prompt, and the number of new tokens."""
Generate = Callable[[], list[list[int]]]


def requests(work: str) -> list[Request]:
    """Return one request, or 16 with prompts of 16 to 512 tokens and 16 to 128 new ones."""
    draw = random.Random(7)
    lengths = [(128, 128)]
    if work != "one":
        lengths = [(draw.randint(16, 512), draw.randint(16, 128)) for _ in range(16)]
    return [([draw.randrange(SHAPE.vocab) for _ in range(a)], b) for a, b in lengths]


def write(folder: Path) -> None:
    """Write the model as a Hugging Face folder."""
    _transformers_model().save_pretrained(folder)


def _transformers_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        max_position_embeddings=SHAPE.seq_length,
        rms_norm_eps=1e-5,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(transformers_weights(SHAPE))
    return model


def transformers(given: Sequence[Request], *, compiled: bool = False) -> Generate:
    """Its batched ``generate`` pads prompts on the left, and runs until the last has ended."""
    model = _transformers_model().eval()
    longest = max(len(prompt) for prompt, _ in given)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in given])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in given])
    options: dict[str, Any] = {}
    if compiled:
        from transformers import CompileConfig

        settings = CompileConfig(fullgraph=False, mode="default")
        settings._compile_all_devices = True  # otherwise only on accelerators
        options = {"cache_implementation": "static", "compile_config": settings}
    most = max(new for _, new in given)

    def generate() -> list[list[int]]:
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=most, **options
        )
        rows: list[list[int]] = out[:, longest:].tolist()
        return [row[:new] for row, (_, new) in zip(rows, given, strict=True)]

    return generate


def litgpt(given: Sequence[Request], *, compiled: bool = False) -> Generate:
    """Its ``generate``, compiled as its command line does."""
    from litgpt import GPT, Config
    from litgpt.generate import base

    config = Config(
        name="llama-of-the-comparison", block_size=SHAPE.seq_length, vocab_size=SHAPE.vocab,
        padded_vocab_size=SHAPE.vocab, n_layer=SHAPE.layers, n_head=SHAPE.heads,
        n_embd=SHAPE.hidden, intermediate_size=SHAPE.ffn, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", norm_eps=1e-5,
    )  # fmt: skip
    model = GPT(config)
    model.load_state_dict(litgpt_weights(SHAPE), strict=False)
    ((prompt, new),) = given
    model.max_seq_length = len(prompt) + new
    model.set_kv_cache(batch_size=1)
    model.eval()
    if compiled:
        torch._dynamo.config.automatic_dynamic_shapes = True
        base.next_token = torch.compile(base.next_token, mode="reduce-overhead")

    def generate() -> list[list[int]]:
        out: Tensor = base.generate(
            model,
            torch.tensor(prompt),
            len(prompt) + new,
            temperature=0.0,
            top_p=0.0,
            include_prompt=False,
        )
        return [out.tolist()]

    return generate


def _loaded(folder: Path, stack: ExitStack) -> Any:
    from ascend_run.tools.convert.opening import SourceOptions
    from ascend_run.tools.generate.model import loaded_model

    return stack.enter_context(loaded_model(folder, SourceOptions(), torch.float32))


def ascend_run(given: Sequence[Request], folder: Path, stack: ExitStack) -> Generate:
    from ascend_run.ops.generation.engine import Request as Ours

    model = _loaded(folder, stack)
    asked = [Ours(prompt=tuple(prompt), max_new_tokens=new) for prompt, new in given]
    pages = sum(-(-one.num_stored // PAGE) for one in asked)

    def generate() -> list[list[int]]:
        engine = model.engine(PAGE * pages)
        ids: dict[int, list[int]] = {engine.submit(one): [] for one in asked}
        while not engine.is_idle:
            for emitted in engine.step():
                ids[emitted.sequence].append(emitted.token)
        return [*ids.values()]

    return generate


def first_token(folder: Path, stack: ExitStack, steps: int, warmup: int) -> dict[str, float]:
    """Seconds to the first token after a prompt, and of the faster of two plain forwards: ours,
    without a cache and with the logits of all tokens, and transformers', with those of the last."""
    from ascend_run.ops.generation.engine import Request as Ours

    model = _loaded(folder, stack)
    ids = torch.randint(SHAPE.vocab, (1, FIRST_TOKENS))
    positions = torch.arange(FIRST_TOKENS)[None]
    request = Ours(prompt=tuple(ids[0].tolist()), max_new_tokens=2)
    engine = model.engine(FIRST_TOKENS + PAGE)
    chunk = model._stage.chunk

    def first() -> None:
        sequence = engine.submit(request)
        assert len(engine.step()) == 1
        engine.cancel(sequence)

    def forward() -> None:
        chunk(ids, positions)

    def their_forward() -> None:
        theirs(ids, logits_to_keep=1, use_cache=False)

    theirs = _transformers_model().eval()
    calls = {"first": first, "forward": forward, "their_forward": their_forward}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for step in range(warmup + steps):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                if step >= warmup:
                    seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain = min(medians["forward"], medians["their_forward"])
    return {"first_seconds": medians["first"], "forward_seconds": plain}


def cache_bytes(folder: Path, stack: ExitStack) -> dict[str, int]:
    """Bytes of the pages' storages after prompts, and by the formula."""
    from ascend_run.ops.generation.engine import Request as Ours

    model = _loaded(folder, stack)
    given = requests("batch")
    pages = sum(-(-(len(prompt) + new - 1) // PAGE) for prompt, new in given)
    engine = model.engine(PAGE * pages)
    for prompt, new in given:
        engine.submit(Ours(prompt=tuple(prompt), max_new_tokens=new))
    engine.step()
    cache = model._stage.forward.cache
    pools = cache._pools.values()
    held = sum(x.untyped_storage().nbytes() for pool in pools for x in (pool.k_GPD, pool.v_GPE))
    assert held == cache.num_bytes
    width = SHAPE.hidden // SHAPE.heads
    formula = pages * PAGE * SHAPE.layers * SHAPE.heads * 2 * width * 4
    return {"storages": held, "formula": formula}


def timed(generate: Generate, steps: int, warmup: int) -> dict[str, Any]:
    seconds = []
    ids: list[list[int]] = []
    for step in range(warmup + steps):
        begin = time.perf_counter()
        ids = generate()
        if step >= warmup:
            seconds.append(time.perf_counter() - begin)
    tokens = sum(map(len, ids))
    rate = tokens / statistics.median(seconds)
    return {"tokens_per_second": rate, "tokens": tokens, "ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("work", choices=("none", "one", "batch", "first", "bytes"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        if options.system == "write":
            write(options.folder)
        elif options.work == "first":
            found = first_token(options.folder, stack, options.steps, options.warmup)
        elif options.work == "bytes":
            found = cache_bytes(options.folder, stack)
        else:
            name, _, form = options.system.partition("-compiled")
            given, compiled = requests(options.work), form is not None and name != options.system
            if options.system == "ascend-run":
                generate = ascend_run(given, options.folder, stack)
            elif name == "litgpt":
                generate = litgpt(given, compiled=compiled)
            else:
                generate = transformers(given, compiled=compiled)
            found = timed(generate, options.steps, options.warmup)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
