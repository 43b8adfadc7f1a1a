"""A Qwen2 folder as published ones are, tiny and untrained, and ShareGPT conversations in Parquet.

python examples/qwen_data.py FOLDER ; needs transformers and pyarrow.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 384


def turn(chance: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    first = chance.randrange(10)
    if chance.random() < 0.5:
        return f"What comes after {WORDS[first]}?", f"{WORDS[(first + 1) % 10]}."
    return f"What comes before {WORDS[first]}?", f"{WORDS[first - 1]}."


def conversation(chance: random.Random) -> list[dict[str, str]]:
    """One to three turns, in ShareGPT's schema."""
    messages = []
    for _ in range(chance.randint(1, 3)):
        question, answer = turn(chance)
        messages += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return messages


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """``tokenizer.json``, and ``tokenizer_config.json`` with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(folder: Path) -> None:
    """Write ``base`` and ``chats/{train,heldout}.parquet``."""
    chance = random.Random(0)
    (folder / "chats").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 2000), ("heldout", 64)):
        rows = [conversation(chance) for _ in range(count)]
        pq.write_table(pa.table({"conversations": rows}), folder / f"chats/{name}.parquet")
        if name == "train":
            texts = [message["value"] for row in rows for message in row]
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder / "base")
    write_tokenizer(folder / "base", texts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
