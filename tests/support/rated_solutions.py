"""Rated solutions as files, and their steps by transformers and torch alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.chats import CHATML, write_lines, write_tokenizer

from .preference_files import WORDS
from .tiny_llama import adamw, write_llama

PLACEHOLDER: Final = "*"
RATINGS: Final = ("+", "-")
OPTIONS: Final = {"plugins.prm.placeholder_token": PLACEHOLDER}
"""The ratings are the task's defaults."""
Solution = tuple[list[int], dict[int, int]]
"""Token ids up to the last placeholder, and the index of the rating at each."""


def solutions(count: int) -> list[dict[str, Any]]:
    """Return records of ``process-reward`` of one to four steps."""
    made = []
    for index in range(count):
        steps = [
            " ".join(WORDS[(index * 5 + step + k) % len(WORDS)] for k in range(1 + index % 3))
            for step in range(1 + index % 4)
        ]
        made.append(
            {
                "input": "".join(f"{step}. {PLACEHOLDER}" for step in steps) + " ten.",
                "value": [RATINGS[(index + len(step)) % 2] for step in steps],
            }
        )
    return made


def write_solutions(folder: Path, count: int) -> Path:
    """Write ``tokenizer`` and ``train.jsonl``, a file of solutions."""
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", solutions(count))
    return folder


def write_model_and_solutions(folder: Path, count: int) -> Path:
    """Write a model, a deeper one, their tokenizer, and files of solutions."""
    write_llama(folder / "model", max_position_embeddings=256)
    write_llama(folder / "deep", num_hidden_layers=4, max_position_embeddings=256)
    write_solutions(folder, count)
    write_lines(folder / "held-out.jsonl", solutions(7))
    return folder


def tokenized(folder: Path, file: Path) -> list[Solution]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (placeholder,) = tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
    found = []
    for record in map(json.loads, file.read_text().splitlines()):
        ids = tokenizer(record["input"])["input_ids"]
        places = [at for at, number in enumerate(ids) if number == placeholder]
        places = places[-len(record["value"]) :]
        rated = dict(zip(places, map(RATINGS.index, record["value"]), strict=True))
        found.append((ids[: places[-1] + 1], rated))
    return found


def columns(folder: Path) -> list[int]:
    """Return the tokens of the ratings."""
    encode = AutoTokenizer.from_pretrained(folder).encode
    return [encode(text, add_special_tokens=False)[-1] for text in RATINGS]


@attrs.frozen(kw_only=True)
class PlainRatings:
    """Losses, gradient norms and accuracies of AdamW steps."""

    model: LlamaForCausalLM
    columns: Sequence[int]
    """Tokens of the ratings."""

    @classmethod
    def of(cls, folder: Path, tokenizer: Path) -> PlainRatings:
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        return cls(model=model, columns=columns(tokenizer))

    def steps(self, batches: Sequence[Sequence[Solution]]) -> Iterator[dict[str, float]]:
        optimizer = adamw([*self.model.parameters()])
        for batch in batches:
            optimizer.zero_grad()
            means = self.backward(batch)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            yield {**means, "grad_norm": float(norm)}

    def backward(self, batch: Sequence[Solution]) -> dict[str, float]:
        """Add the gradients of the mean loss of all steps; return it, and the accuracy."""
        values = torch.cat([self._values(ids, rated) for ids, rated in batch])
        wanted = torch.tensor([rating for _, rated in batch for rating in rated.values()])
        loss = F.cross_entropy(values, wanted)
        loss.backward()
        right = (values.detach().argmax(1) == wanted).double()
        return {"loss": float(loss.detach()), "accuracy": float(right.mean())}

    def _values(self, ids: list[int], rated: dict[int, int]) -> Tensor:
        logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        return logits[[*rated]][:, [*self.columns]]
