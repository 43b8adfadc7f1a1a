"""Position biases that plugins add, of which a target's format may have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_run.plugin_api.errors import AscendRunError, CheckpointError, PluginResolutionError
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import Catalogue, discover
from ascend_run.registry.kinds import Plugin
from ascend_run.registry.static_manifest import static_manifest
from ascend_run.testing.oracle.known import ALIBI_FAMILIES
from ascend_run.types.config import RunConfig
from ascend_run.types.declarations import Claim


def plugins_with_bias(names: Sequence[str], file: Path) -> Mapping[str, Plugin]:
    """Return those of a run's plugins that add a position bias.

    A plugin is imported if its static manifest does not declare that it adds none.

    Args:
        file: The run's config.

    Raises:
        PluginResolutionError: A plugin is not installed or cannot be used.
    """
    catalogue = discover()
    try:
        loaded = catalogue.load(name for name in names if may_have_bias(name, catalogue))
    except AscendRunError as problem:
        raise PluginResolutionError(
            f"{file} enables plugins that cannot be loaded, and one may add a position bias to the "
            "model; install them, or name a config without them with --config",
            problem.problems or (problem.headline,),
        ) from None
    return {
        name: found for name, found in loaded.items() if Claim.POSITION_BIAS in claims_of(found)
    }


def may_have_bias(name: str, catalogue: Catalogue) -> bool:
    """Whether a plugin does not declare that it adds no position bias."""
    declared, _ = static_manifest(catalogue[name]) if name in catalogue else (None, "")
    return declared is None or declared.claims is None or Claim.POSITION_BIAS in declared.claims


def has_unnamed_bias(family: str) -> bool:
    """Whether a model family adds a position bias for which Megatron's args have no value."""
    catalogue = discover()
    if family in ALIBI_FAMILIES or family not in catalogue or not may_have_bias(family, catalogue):
        return False
    return Claim.POSITION_BIAS in claims_of(catalogue.load([family])[family])


def require_no_bias(config: RunConfig, folder: Path, target: str) -> None:
    """Check that no feature of the run adds a position bias, as models of a format have none.

    Args:
        config: Of a model, with the features that add a bias.

    Raises:
        CheckpointError: One does.
    """
    if config.enable:
        raise CheckpointError(
            f"this model cannot be written as {target}; use --to ascend-run, which keeps it",
            [
                f"plugin {name} adds a position bias to the attention of {folder}, which {target} "
                "does not have"
                for name in config.enable
            ],
        )
