"""Gradients of a step of a task, of any model of transformers, by the formula of its logits; and
those of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.runtime import RankOutcome
from tests.support.loaded_model import gradient_shards
from tests.support.small_runs import Values, standing_rank

from . import preference_files, rated_solutions
from .chats import CHATML, GENERATION, write_lines, write_tokenizer
from .plain_preferences import Pair, log_probability
from .plain_rewards import closed

SAMPLES: Final = 2
TASKS: Final = ("sft", "dpo", "simpo", "orm", "prm")
PAIRS, SOLUTIONS = "pairs.jsonl", "solutions.jsonl"
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sft": {"handler": "sharegpt"},
    "prm": {"placeholder_token": rated_solutions.PLACEHOLDER},
}
"""Task -> its options in every run."""


def write_samples(folder: Path) -> Path:
    """Write a tokenizer, pairs, and rated solutions of one and three steps."""
    write_tokenizer(folder / "tokenizer", CHATML)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / PAIRS, preference_files.preferences(SAMPLES))
    made = rated_solutions.solutions(3)
    write_lines(folder / SOLUTIONS, [made[0], made[2]])
    chats = [
        {"conversations": [*one["conversations"], one["chosen"]]}
        for one in preference_files.preferences(SAMPLES)
    ]
    write_lines(folder / "chats.jsonl", chats)
    return folder


def task_values(task: str, folder: Path, *, packing: bool) -> dict[str, Any]:
    """Return config values of a step on all samples, in rows of their own or in one."""
    file = {"sft": "chats.jsonl", "prm": SOLUTIONS}.get(task, PAIRS)
    options = {**OPTIONS.get(task, {}), "packing": packing}
    return {
        "task": task,
        "data.train": [str(folder / file)],
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_length": 128 if packing else 64,
        "train.global_batch_size": 1 if packing else SAMPLES,
        "train.micro_batch_size": 1,
        "train.train_iters": 1,
        "train.precision": "fp32",
        **{f"plugins.{task}.{name}": value for name, value in options.items()},
    }


@attrs.frozen(kw_only=True)
class TaskOutcome:
    """One rank's results of a step in float64."""

    loss: float
    gradients: RankOutcome
    score_KH: Tensor | None
    """The weight of the score head."""


def task_gradients(runs: Sequence[tuple[Values, Sequence[str]]]) -> list[TaskOutcome]:
    """Return the mean loss and the gradients of the first step of each run. A job for the pool.

    Args:
        runs: Config values and plugins.
    """
    return [_task_gradients(values, enable) for values, enable in runs]


def _task_gradients(values: Values, enable: Sequence[str]) -> TaskOutcome:
    from ascend_run.testing.dry_run import DryRun

    with standing_rank(values, enable) as (hooks, context):
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        dry_run.load_weights()
        samples = dry_run.task_samples(context.config.train.global_batch_size)
        assert samples is not None
        loss = dry_run.gradients(forward_backward, dry_run.batches(samples, first=0)).loss
        (chunk,) = dry_run.bundle.chunks
        heads = [p for name, p in chunk.named_parameters() if name.endswith("score.weight")]
        return TaskOutcome(
            loss=loss,
            gradients=RankOutcome(losses=(), grad_norms=(), shards=gradient_shards(dry_run)),
            score_KH=heads[0].detach().clone() if heads else None,
        )


@attrs.frozen(kw_only=True)
class PlainTask:
    """The loss of a task by transformers' logits and torch, one document at a time.

    Args:
        score_KH: The weight of the score head, which gets a gradient, of ``orm``.
        reference: The reference of ``dpo``.
    """

    folder: Path
    model: nn.Module
    reference: nn.Module
    score_KH: Tensor | None = None

    def backward(self, task: str) -> float:
        """Add the gradients of the mean loss of all samples; return the loss."""
        with computing_in(torch.float64):
            loss: Tensor = getattr(self, f"_{task}")()
            loss.backward()
        return float(loss.detach())

    def _of_pairs(self, loss: Callable[[Pair], Tensor]) -> Tensor:
        pairs = preference_files.tokenized(self.folder / "blocks", self.folder / PAIRS)
        assert len(pairs) == SAMPLES
        return torch.stack([loss(pair) for pair in pairs]).mean()

    def _sft(self) -> Tensor:
        pairs = preference_files.tokenized(self.folder / "blocks", self.folder / PAIRS)
        total = torch.stack([log_probability(self.model, chosen) for chosen, _ in pairs]).sum()
        return -total / sum(sum(trained[1:]) for (_, trained), _ in pairs)

    def _dpo(self) -> Tensor:
        def loss(pair: Pair) -> Tensor:
            with torch.no_grad():
                theirs = [log_probability(self.reference, answer) for answer in pair]
            ours = [log_probability(self.model, answer) for answer in pair]
            chosen, rejected = (p - r for p, r in zip(ours, theirs, strict=True))
            return torch.log1p(torch.exp(-0.1 * (chosen - rejected)))

        return self._of_pairs(loss)

    def _simpo(self) -> Tensor:
        def loss(pair: Pair) -> Tensor:
            chosen, rejected = (
                log_probability(self.model, answer) / sum(answer[1][1:]) for answer in pair
            )
            return torch.log1p(torch.exp(-2.5 * (chosen - rejected - 1.4)))

        return self._of_pairs(loss)

    def _orm(self) -> Tensor:
        def reward(ids: list[int], trained: list[bool]) -> Tensor:
            assert self.score_KH is not None
            hidden_BSH = last_hidden(self.model, closed(ids, trained))
            return hidden_BSH[0, -1] @ self.score_KH[0]

        def loss(pair: Pair) -> Tensor:
            chosen, rejected = (reward(*answer) for answer in pair)
            return torch.log1p(torch.exp(-(chosen - rejected)))

        return self._of_pairs(loss)

    def _prm(self) -> Tensor:
        given = rated_solutions.tokenized(self.folder / "tokenizer", self.folder / SOLUTIONS)
        columns = rated_solutions.columns(self.folder / "tokenizer")
        values, wanted = [], []
        for ids, rated in given:
            logits_SV = self.model(input_ids=torch.tensor([ids])).logits[0]
            values.append(logits_SV[[*rated]][:, columns])
            wanted += rated.values()
        return F.cross_entropy(torch.cat(values), torch.tensor(wanted))


def last_hidden(model: nn.Module, ids: list[int]) -> Tensor:
    """Return what the last norm of a causal model returns, [1, S, H]."""
    found: list[Tensor] = []
    inner: Any = getattr(model, "model", None) or model.transformer
    norm = inner.ln_f if hasattr(inner, "ln_f") else inner.norm
    handle = norm.register_forward_hook(lambda _, __, out: found.append(out))
    try:
        model(input_ids=torch.tensor([ids]))
    finally:
        handle.remove()
    return found[0]
