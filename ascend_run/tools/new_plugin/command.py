"""The command line of ``ascend-run new-plugin``. Imports click and little else."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .seams import KINDS, SEAMS

if TYPE_CHECKING:
    from .names import Names


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="Kind of the plugin; default: that of --seam, or feature.",
)
@click.option(
    "--seam",
    type=click.Choice([*SEAMS]),
    help="What the plugin is written from; default of a feature: layer.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the package, new or empty; default: ./ascend-run-NAME.",
)
def command(name: str, kind: str | None, seam: str | None, folder: Path | None) -> None:
    """Create a package with a new plugin.

    \b
    ascend-run new-plugin my-feature
    ascend-run new-plugin my-attention --seam attention
    ascend-run new-plugin my-device --kind platform

    The package can be installed as it is, and passes its tests and the conformance kit. NAME is the
    name to pass to --enable; for a model family, Hugging Face's model_type.
    """
    from .names import Names, name_problems
    from .rendering import package_files
    from .writing import folder_problems, write_package

    of_seam = SEAMS.get(seam or "")
    kind = kind or of_seam or KINDS[0]
    names = Names.of(name, kind, seam)
    target = Path(names.distribution) if folder is None else folder
    problems = name_problems(name, kind)
    if of_seam not in (None, kind):
        problems.append(f"--seam {seam} is of a {of_seam}, not of a {kind}; leave out --kind")
    if not problems or folder is not None:
        problems += folder_problems(target)
    if problems:
        from ascend_run.plugin_api.errors import ConfigError

        raise ConfigError(f"cannot write a plugin '{name}'", problems)
    written = package_files(names)
    write_package(target, written)
    click.echo(f"{target}: {kind} '{name}', {len(written)} files. Try it:\n")
    for words in next_commands(names, target):
        click.echo(f"  {words}")


def next_commands(names: Names, target: Path) -> tuple[str, ...]:
    """Return shell commands that install the package, show the plugin, and test it."""
    plain = target.is_absolute() or str(target).startswith(".")
    place = str(target) if plain else f"./{target}"
    return (
        f"pip install --editable {shlex.quote(place + '[test]')}",
        f"ascend-run plugins show {names.name}",
        f"pytest {shlex.quote(str(target))}",
    )
