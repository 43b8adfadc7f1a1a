"""Tiny tokenizers and conversation files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LAST_TURN_THINKS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNCLOSED = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEXT = (
    "What is the capital of France? Paris. The quick brown fox says hello, and then hello again. "
    "user assistant system [INST] [/INST] one two three four five six seven eight nine ten\n"
)

SHORT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
]
LONG = [
    {"role": "system", "content": "The fox says hello."},
    {"role": "user", "content": "one two?"},
    {"role": "assistant", "content": "three four, and then five"},
    {"role": "user", "content": "hello again"},
    {"role": "assistant", "content": "six seven"},
]


def bytes_tokenizer(**options: Any) -> Tokenizer:
    """Build a byte-level tokenizer that merges over spaces and line ends."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 20, trainer)
    return backend


def greedy_tokenizer() -> Tokenizer:
    """Build the same without word boundaries: merges over anything but special tokens."""
    backend = bytes_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\r]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["assistant: Paris.\nuser: one two"] * 50 + [TEXT], trainer)
    return backend


def metaspace_tokenizer() -> Tokenizer:
    """Build a SentencePiece-like tokenizer: a space precedes a text's first token."""
    backend = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    backend.train_from_iterator([TEXT + "<>?|"] * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_tokenizer(
    folder: Path, template: str | None = CHATML, backend: Tokenizer | None = None, **config: Any
) -> Path:
    """Write a tokenizer's folder as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or bytes_tokenizer()).save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        **({} if template is None else {"chat_template": template}),
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def with_mask(
    tokenizer: Any, messages: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[bool]]:
    """Return ids, and which of them the assistant says, by a template with generation blocks."""
    encoded = tokenizer.apply_chat_template(
        [*messages], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]]


def write_lines(path: Path, records: Iterable[Mapping[str, Any] | str]) -> str:
    """Write a JSON lines file; strings are written verbatim."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
