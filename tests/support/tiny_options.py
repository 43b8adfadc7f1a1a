"""Command-line options of a tiny model that is planned and never run."""

from __future__ import annotations

from typing import Any, Final

from ascend_run.prepare.prepare import PreparedRun, prepare

DENSE_WORDS: Final = (
    "model.family=llama",
    "data.train=x",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=48",
    "model.vocab_size=64",
    "data.seq_length=16",
)


def planned_with(plugin: str, *words: str, ranks: int | None = None) -> PreparedRun:
    """Return the plan of the tiny model with a feature, or several separated by commas.

    Raises:
        AscendRunError: If planning fails.
    """
    options: dict[str, Any] = {} if ranks is None else {"world_size": ranks}
    return prepare(None, [*DENSE_WORDS, *words], enable=plugin.split(","), **options)
