"""Write the table of docs/long-sequences.md: which context-parallel plugin fine-tunes on what.

python -m scripts.long_sequence_table            # writes
python -m scripts.long_sequence_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from ascend_run.plugin_api import Claim, ConfigError
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.models import DENSE
from scripts.marked_pages import between, write_or_check
from tests.support.chats import SHORT, write_lines, write_tokenizer
from tests.support.small_runs import prepare

PAGE: Final = Path(__file__).parent.parent / "docs/long-sequences.md"
BEGIN, END = "<!-- fine-tuning:begin -->", "<!-- fine-tuning:end -->"
RANKS: Final = {"double-ring": 4, "hybrid-cp": 4, "hybrid-adaptive-cp": 4}
"""Context-parallel ranks of plugins that need more than two."""
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "packed": {"plugins.sft.packing": True},
    "packed, bidirectional prompts": {
        "plugins.sft.packing": True,
        "plugins.sft.bidirectional_prompt": True,
    },
    "one conversation a sample": {},
    "packed, 97 tokens": {"plugins.sft.packing": True, "data.seq_length": 97},
    "packed, two rows": {"plugins.sft.packing": True, "train.micro_batch_size": 2},
}
"""Column -> options of the run."""


def plugins() -> list[str]:
    """Return the built-in plugins that define context parallelism, by name."""
    catalogue = discover()
    ours = [n for n, found in catalogue.items() if found.first_party and found.kind is Kind.FEATURE]
    loaded = catalogue.load(ours)
    return sorted(n for n, one in loaded.items() if Claim.CONTEXT_PARALLEL in claims_of(one))


def conversations() -> list[dict[str, Any]]:
    """Return conversations of different lengths, whose turns have weights."""
    return [
        {
            "messages": [
                SHORT[0],
                {"role": "assistant", "content": "hello again " * (number + 1), "weight": 0.5},
                {"role": "user", "content": "one two?"},
                {"role": "assistant", "content": "three"},
            ]
        }
        for number in range(8)
    ]


def values(folder: Path, plugin: str, kind: str) -> dict[str, Any]:
    """Return the config of a run in a folder, to which its tokenizer and data are written."""
    write_tokenizer(folder / "tokenizer")
    return {
        **DENSE,
        "task": "sft",
        "model.num_attention_heads": 8,
        "model.num_query_groups": 4,
        "model.vocab_size": 400,
        "model.max_position_embeddings": 128,
        "data.train": [write_lines(folder / "chats.jsonl", conversations())],
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_length": 96,
        "parallel.context_parallel_size": RANKS.get(plugin, 2),
        **KINDS[kind],
    }


def refusal(plugin: str, kind: str) -> str | None:
    """Return why a run does not start; None if it does."""
    with TemporaryDirectory() as folder:
        try:
            prepare(values(Path(folder), plugin, kind), (plugin,), RANKS.get(plugin, 2))
        except ConfigError as error:
            return "; ".join(error.problems)
    return None


def table() -> str:
    """Return what stands between the markers."""
    reasons: dict[str, int] = {}
    return "\n".join((*_rows(reasons), *_notes(reasons)))


def _rows(reasons: dict[str, int]) -> Iterator[str]:
    yield f"| plugin | {' | '.join(KINDS)} |"
    yield f"| --- |{' --- |' * len(KINDS)}"
    for plugin in plugins():
        cells = []
        for kind in KINDS:
            if (why := refusal(plugin, kind)) is None:
                cells.append("runs")
            else:
                cells.append(f"refused ({reasons.setdefault(why, len(reasons) + 1)})")
        yield f"| [{plugin}](plugins/sequence/{plugin}.md) | {' | '.join(cells)} |"


def _notes(reasons: Mapping[str, int]) -> Iterator[str]:
    for why, number in reasons.items():
        yield from ("", *textwrap.wrap(f"({number}) {why}", 118))


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write the table."""
    new = between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table())
    write_or_check(PAGE, new, "scripts.long_sequence_table", check=check)


if __name__ == "__main__":
    command()
