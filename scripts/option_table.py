"""Write docs/configuration.md: which of Megatron's options are supported.

python -m scripts.option_table            # writes the page
python -m scripts.option_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ascend_run.core.config.megatron_fields import MegatronField, megatron_fields
from ascend_run.plugin_api.error_text import show
from ascend_run.prepare.config.schema import all_options
from ascend_run.prepare.config.unsupported import CHOICES, refused_because
from scripts.field_readers import READERS

PAGE: Final = Path(__file__).parent.parent / "docs/configuration.md"
HEAD: Final = """# Configuration: Megatron's options

    ascend-run plan --config run.toml model.qk_l2_norm=true

Set an option of Megatron by its own name, in `[model]` or `[parallel]` or on the command line: they
take the fields of the installed Megatron's `TransformerConfig`. Each option either has an effect or
is rejected when the run is planned, with its name and the reason, before any process starts (exit
code 2): none is silently ignored. `scripts/option_table.py` generates this page from the tables
that planning uses.

## Supported options

*Read by* is the module that implements the option; tests run tiny models and check that it is
read. The default is Megatron's, unless the model family sets another.
"""
REFUSED: Final = """
## Unsupported options

Megatron's default is always accepted; any other value is rejected for the given reason.
"""


def _key(field: MegatronField) -> str:
    return f"`{field.section}.{field.name}`"


def _chosen() -> Iterator[str]:
    defaults = {option.name: option.default for option in all_options({}).values()}
    for name, field in sorted(megatron_fields().items()):
        if name not in READERS:
            continue
        some = ""
        if name in CHOICES:
            some = f"; one of {', '.join(f'`{value}`' for value in CHOICES[name][0])}"
        yield f"| {_key(field)} | `{show(defaults[name])}`{some} | `{READERS[name]}` |"


def _refused() -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for _, field in sorted(megatron_fields().items()):
        if why := refused_because(field):
            by_reason.setdefault(why, []).append(_key(field))
    for why, keys in sorted(by_reason.items()):
        yield f"| {why} | {', '.join(keys)} |"


def page() -> str:
    """Return the page as text."""
    chosen = ["| option | default | read by |", "|---|---|---|", *_chosen()]
    refused = ["| reason | options |", "|---|---|", *_refused()]
    return "\n".join([HEAD, *chosen, REFUSED, *refused]) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write docs/configuration.md."""
    if not check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        click.echo(f"{PAGE} is out of date; run scripts/option_table.py", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
