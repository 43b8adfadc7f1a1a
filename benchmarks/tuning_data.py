"""What both systems fine-tune on: a Hugging Face folder of a Llama, an adapter to begin with,
conversations and pairs of answers; one JSON line.

All text is of Python's standard library: its functions, their documentation and their code.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import statistics
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.text.packing import pack

from . import llama
from .data_preparation import ASCEND_RUN
from .protocol import run

SHAPE: Final = llama.Shape(
    layers=6, hidden=384, ffn=1024, heads=6, vocab=8192, seq_length=1024, micro_batch=1
)
"""16.9M parameters. The sequence length is that of a packed sample."""
TINY: Final = attrs.evolve(
    SHAPE, layers=2, hidden=64, ffn=128, heads=2, vocab=1024, seq_length=512
)  # only for a test
SAMPLES: Final = 4
"""Packed samples of a step."""
MICRO_BATCH: Final = 4
"""Records of a padded micro-batch; their number is divisible by it, as the mean over pairs is of
equal micro-batches."""
RECORDS: Final = 1000
"""Conversations, and pairs, that they are taken from."""
RANK: Final = 16
ALPHA: Final = 32
TARGETS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
CLOSING: Final = "<|im_end|>"
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Its generation blocks are what trl needs to train the assistant's tokens alone."""


@attrs.frozen(kw_only=True)
class Function:
    """A function of the library."""

    module: str
    head: str
    """Its first lines, up to the colon."""
    documentation: str
    body: str
    """Its other lines, without indentation."""

    @property
    def question(self) -> str:
        return f"Write the body of this function of {self.module}:\n{self.head}"


def functions(text: str, module: str) -> Iterator[Function]:
    """Yield the functions of a source file that have more than a docstring."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documentation = ast.get_docstring(node) or ""
        body = node.body[bool(documentation) :]
        if not body or body[0].lineno == node.lineno:
            continue
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        code = textwrap.dedent("\n".join(lines[body[0].lineno - 1 : node.end_lineno])).strip()
        yield Function(
            module=module,
            head=textwrap.dedent("\n".join(head)).strip(),
            documentation=documentation.strip(),
            body=code,
        )


def library() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every module of the library that is in one file."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.stem, path.read_text(encoding="utf-8", errors="ignore")


def conversation(function: Function) -> dict[str, Any]:
    """Return a record: first what the function does, if that is documented, then its code."""
    turns = [(function.question, function.body)]
    if function.documentation:
        asked = f"What does {function.head.split('(')[0].removeprefix('def ')} do?"
        turns = [(asked, function.documentation), turns[0]]
    return {
        "messages": [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    }


def pair(function: Function, other: Function) -> dict[str, Any]:
    """Return a record of ``sharegpt-pairwise``: its own body, and that of another function."""
    return {
        "conversations": [{"from": "human", "value": function.question}],
        "chosen": {"from": "gpt", "value": function.body},
        "rejected": {"from": "gpt", "value": other.body},
    }


def write_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int) -> Path:
    """Train a tokenizer, and write it with the template; return its folder."""
    from tokenizers import AddedToken, Tokenizer

    source, target = folder / "text.jsonl", folder / "model"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    target.mkdir()
    special = ["<|im_start|>", CLOSING]
    run([*ASCEND_RUN, "preprocess", "--input", source, "--output-prefix", folder / "text",
        "--train-tokenizer", str(vocabulary - len(special)),
        "--tokenizer-out", target / "tokenizer.json"])  # fmt: skip
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"eos_token": CLOSING, "pad_token": "<|im_start|>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def write_model(folder: Path, shape: llama.Shape) -> None:
    """Write the weights of the comparison, and the adapter that both begin with."""
    import torch
    from peft import LoraConfig, get_peft_model

    from .peer_steps import Setting, transformers_model

    torch.manual_seed(0)
    setting = Setting(shape=shape, dtype=torch.float32, device="cpu")
    model = transformers_model(setting)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*TARGETS], task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder / "adapter")


def encoded(tokenizer: Any, messages: list[dict[str, str]]) -> int:
    """Return the number of tokens up to the last trained one."""
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = found["assistant_masks"]
    return len(trained) - trained[::-1].index(1)


def answers(record: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Return the one conversation of a record, or those with either answer."""
    if "messages" in record:
        return [record["messages"]]
    question = {"role": "user", "content": record["conversations"][0]["value"]}
    return [
        [question, {"role": "assistant", "content": record[side]["value"]}]
        for side in ("chosen", "rejected")
    ]


def write_step(
    path: Path, tokenizer: Any, records: Sequence[dict[str, Any]], samples: int, limit: int
) -> dict[str, Any]:
    """Write the records of some packed samples of all of them: what a step trains on.

    A few records alone would fill their samples less than those of a data set are filled.

    Args:
        limit: Positions of a sample.

    Returns:
        What was written: records, the samples that hold them, and lengths in tokens.
    """
    lengths = [[encoded(tokenizer, one) for one in answers(record)] for record in records]
    fitting = [number for number, tokens in enumerate(lengths) if sum(tokens) <= limit]
    group = len(lengths[0])
    packs = pack([n for number in fitting for n in lengths[number]], limit, group)
    taken = [fitting[i // group] for held in random.Random(0).sample(packs, samples) for i in held]
    written = sorted({*taken})
    del written[len(written) - len(written) % MICRO_BATCH :]
    path.write_text("".join(json.dumps(records[number]) + "\n" for number in written))
    documents = [length for number in written for length in lengths[number]]
    return {
        "records": len(written),
        "samples": len(pack(documents, limit, group)),
        "tokens": sum(documents),
        "quartiles": statistics.quantiles(documents),
        "longest": max(documents),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="for a test")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a step")
    options = parser.parse_args(arguments)
    shape = TINY if options.tiny else SHAPE
    texts = dict(itertools.islice(library(), 20 if options.tiny else None))
    from transformers import AutoTokenizer

    write_tokenizer(options.folder, texts.values(), shape.vocab)
    write_model(options.folder, shape)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
    found = [one for module, text in texts.items() for one in functions(text, module)]
    random.Random(0).shuffle(found)
    found = found[: (60 if options.tiny else RECORDS) + 1]
    records = {
        "sft": [conversation(one) for one in found],
        "dpo": [pair(one, other) for one, other in itertools.pairwise(found)],
    }
    sizes = {
        task: write_step(
            options.folder / f"{task}.jsonl", tokenizer, made, options.samples, shape.seq_length
        )
        for task, made in records.items()
    }
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
