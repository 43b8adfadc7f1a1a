"""The available commands: train, completion, and those of the group ``ascend_run.commands``.

They are read from metadata and imported when they are called. Imports no attrs, to keep ``--help``
fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import click

from ascend_run.registry.offers import OWN_DISTRIBUTION, Offer, offers_in

GROUP: Final = "ascend_run.commands"
TRAIN: Final = "train"


class Command(NamedTuple):
    """A command that is not imported yet."""

    value: str
    """``package.module:object``, a click command."""
    summary: str
    """The first line of its help; for a third-party command, its distribution."""

    def load(self) -> click.Command:
        """Import it.

        Raises:
            UsageError: It cannot be imported, or is not a click command.
        """
        module, _, name = self.value.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            if module.startswith("ascend_run."):
                raise
            raise click.UsageError(
                f"{self.value} ({self.summary}) cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, click.Command):
            raise click.UsageError(
                f"{self.value} ({self.summary}) is not a click command: {found!r}"
            )
        return found


OWN: Final[Mapping[str, Command]] = {
    TRAIN: Command(
        "ascend_run.entrypoints.train:command", "Train, with the plugins that you name."
    ),
    "completion": Command(
        "ascend_run.entrypoints.completion:command", "Print the shell's completion script."
    ),
}
"""Commands without an entry point."""


def command_named(name: str) -> Command | None:
    """Return a command; other distributions are read only if this one has none of that name."""
    if name in OWN:
        return OWN[name]
    ours, _ = offers_in((GROUP,), "command", only=OWN_DISTRIBUTION)
    found = [_command(offer) for offer in ours if offer.entry_point.name == name]
    return found[0] if found else commands().get(name)


def commands() -> Mapping[str, Command]:
    """Return all commands by name, sorted. A built-in command shadows others of its name; of two
    third-party commands with the same name neither is available."""
    offers, _ = offers_in((GROUP,), "command")
    by_name: dict[str, list[Offer]] = {}
    for offer in offers:
        by_name.setdefault(offer.entry_point.name, []).append(offer)
    chosen = {name: [o for o in some if _is_ours(o)] or some for name, some in by_name.items()}
    found = {name: _command(*some) for name, some in chosen.items() if len(some) == 1}
    return dict(sorted({**found, **OWN}.items()))


def _is_ours(offer: Offer) -> bool:
    return offer.distribution == OWN_DISTRIBUTION


def _command(offer: Offer) -> Command:
    value = offer.entry_point.value
    if not _is_ours(offer):
        return Command(value, f"Of {offer.distribution} {offer.version}.")
    tool = importlib.import_module(offer.entry_point.module.rpartition(".")[0])
    return Command(value, tool.SUMMARY)
