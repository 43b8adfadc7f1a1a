"""``ascend-run preset``: list, show, and write the config of a published model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

from ascend_run.tools.terminal.run_options import complete_platform, complete_task

DEVICES: Final = {"npu": "ascend-910b", "cuda": "h100", "cpu": "cpu"}
"""Platform -> the device that times are of, unless ``--device`` names another."""
_UNITS: Final = {
    "TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "TB": 10**12, "GB": 10**9, "MB": 10**6,
}  # fmt: skip


def _memory_size(ctx: click.Context, param: click.Parameter, given: str | None) -> float | None:
    """Return the bytes of a size with its unit, such as ``64GiB``."""
    if given is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", given.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or float(match[1]) <= 0:
        raise click.BadParameter(
            f"{given!r}: expected a size above 0 with its unit, such as 64GiB or 80GB"
        )
    return float(match[1]) * units[match[2].lower()]


def _complete_name(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from .presets import presets

    return [
        CompletionItem(name, help=f"{preset.family}, {preset.published}")
        for name, preset in presets().items()
        if name.startswith(incomplete.lower())
    ]


@click.group("preset")
def command() -> None:
    """List published models; write a run's config for one, with a layout that fits.

    \b
    ascend-run preset list
    ascend-run preset show qwen2.5-7b
    ascend-run preset write qwen2.5-7b --devices 16 --memory 64GiB -o run.toml

    A preset has the numbers of the model's public config. Its layout is chosen for your devices.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List the presets."""
    from .listing import rows, table_lines

    click.echo(json.dumps(rows(), indent=2) if as_json else "\n".join(table_lines()))


@command.command("show")
@click.argument("name", shell_complete=_complete_name)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(name: str, as_json: bool) -> None:
    """Show a preset's numbers, their source, and the [model] section that they make."""
    from .page import described, page_lines
    from .presets import find_preset

    preset = find_preset(name)
    text = json.dumps(described(preset), indent=2) if as_json else "\n".join(page_lines(preset))
    click.echo(text)


@command.command("write")
@click.argument("name", shell_complete=_complete_name)
@click.option("--devices", type=click.IntRange(min=1), required=True, help="Devices of all nodes.")
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_memory_size,
    help="Memory of a device, such as 64GiB; default: the device's.",
)
@click.option("--seq-length", type=click.IntRange(min=1), help="Tokens; default: the preset's.")
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    help="Sequences of a step; default: at least 256.",
)
@click.option("--task", default="pretrain", shell_complete=complete_task, help="Default: pretrain.")
@click.option("--platform", default="npu", shell_complete=complete_platform, help="Default: npu.")
@click.option("--device", help="Device that times are of, as in plan; default: the platform's.")
@click.option("--data", multiple=True, metavar="NAME", help="data.train; may be repeated.")
@click.option("--tokenizer", metavar="PATH", help="data.tokenizer.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Config file to write; must not exist.",
)
def write_command(
    name: str,
    devices: int,
    memory: float | None,
    seq_length: int | None,
    global_batch_size: int | None,
    task: str,
    platform: str,
    device: str | None,
    data: tuple[str, ...],
    tokenizer: str | None,
    output: Path,
) -> None:
    """Write a run's config, with the fastest layout that fits into the devices' memory.

    Tensor, pipeline, context and expert parallelism, recomputation and the sharding of the
    optimizer are chosen with the cost model of ``plan``. The file states the choice and the
    runner-up.
    """
    from ascend_run.tools.plan.cost_model.devices import find_device

    from .presets import find_preset
    from .runs import Request
    from .writing import refuse_existing, written_run

    refuse_existing(output)
    request = Request(
        preset=find_preset(name),
        devices=devices,
        platform=platform,
        task=task,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        train=data,
        tokenizer=tokenizer,
    )
    chosen = find_device(device or DEVICES.get(platform, DEVICES["npu"]))
    with _bar() as progress:
        summary = written_run(request, chosen, memory or chosen.memory_bytes, output, progress)
    click.echo("\n".join(summary))


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (layouts done, layouts in all) that draws a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bars:
        task = bars.add_task("layouts", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
