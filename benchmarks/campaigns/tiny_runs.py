"""A whole run of one step on one rank in this process: one tiny layer, its own data and folder."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.testing.models import MODELS
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for

_VOCAB_SIZE: Final = 272
"""Every byte, and a few special tokens."""

VALUES: Final[Mapping[str, Any]] = {
    "model.num_layers": 1,
    "model.vocab_size": _VOCAB_SIZE,
    "data.seq_length": 64,
    "train.train_iters": 1,
    "train.global_batch_size": 1,
    "train.eval_interval": 1,
    "train.eval_iters": 1,
    "train.log_interval": 1,
    "checkpoint.save_interval": 1,
    "optimizer.lr_warmup_iters": 0,
}
"""One layer and one step, with everything around them that a run has: reading, evaluation, log,
checkpoint."""


FILES: Final[Mapping[str, str]] = {
    "dpo": "pairs.jsonl",
    "orm": "pairs.jsonl",
    "prm": "solutions.jsonl",
    "sft": "chats.jsonl",
    "simpo": "pairs.jsonl",
}
"""Task -> its file; others read token files."""
_OPTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "prm": {"plugins.prm.placeholder_token": "*"},
}
"""Task -> what its file needs."""


@contextmanager
def folder_with_data() -> Iterator[Path]:
    """A folder with token files, conversations, pairs, rated solutions and a tokenizer; gone
    afterwards."""
    folder = Path(mkdtemp(prefix="campaign-"))
    try:
        _write_tokens(folder / "tokens")
        _write_tokenizer(folder)
        (folder / "chats.jsonl").write_text("".join(_chat(number) for number in range(40)))
        (folder / "pairs.jsonl").write_text("".join(_pair(number) for number in range(40)))
        (folder / "solutions.jsonl").write_text("".join(map(_solution, range(40))))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def data_folder() -> Path:
    """Return such a folder, for as long as this process lives."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(folder_with_data())


def prepare(
    folder: Path,
    enable: Sequence[str],
    *,
    task: str = "pretrain",
    model: str = "dense",
    values: Mapping[str, Any] | None = None,
    world_size: int = 1,
) -> PreparedRun:
    """A run as an entry point prepares it; its own folder is ``folder/run``."""
    data = str(folder / FILES.get(task, "tokens"))
    chosen = {
        **MODELS[model],
        **VALUES,
        "data.train": [data],
        "data.validation": [data],
        "run.output_dir": str(folder / "run"),
        "task": task,
        "enable": [*enable],
        **(
            {"data.tokenizer": str(folder), f"plugins.{task}.template": "chatml"}
            if task in FILES
            else {}
        ),
        **_OPTIONS.get(task, {}),
        **(values or {}),
    }
    given = {name: RawValue(value, "the campaign") for name, value in chosen.items()}
    return prepare_raw(RawConfig(values=given), world_size=world_size)


def train(prepared: PreparedRun) -> None:
    """The run itself; its folder is removed afterwards."""
    import torch

    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # Megatron's own, of what it does without
        from ascend_run.core.run import run_training

        # Which hooks are called does not depend on what the compiler makes of a layer.
        torch.compiler.set_stance("force_eager")
        try:
            run_training(prepared.run_request())
        finally:
            torch.compiler.set_stance("default")
            shutil.rmtree(prepared.config.run.output_dir, ignore_errors=True)


def _write_tokens(prefix: Path) -> None:
    drawn = random.Random(3)
    with bin_path(str(prefix)).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(_VOCAB_SIZE))
        for _ in range(40):
            writer.add([drawn.randrange(_VOCAB_SIZE) for _ in range(20)])
    idx_path(str(prefix)).write_bytes(writer.index())


def _chat(number: int) -> str:
    """A line, unlike the others."""
    turns = [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": str(number**5)},
    ]
    return json.dumps({"messages": turns}) + "\n"


def _pair(number: int) -> str:
    """A line, unlike the others."""
    record = {
        "conversations": [{"from": "human", "value": f"{number}?"}],
        "chosen": {"from": "gpt", "value": str(number**2)},
        "rejected": {"from": "gpt", "value": str(number**3 + 7)},
    }
    return json.dumps(record) + "\n"


def _solution(number: int) -> str:
    """A line, unlike the others."""
    record = {"input": f"{number}? {number**2} * {number**3} *", "value": ["+", "+-"[number % 2]]}
    return json.dumps(record) + "\n"


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(["one two"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
