"""The public names for authors of plugins, by page of the reference.

``ascend-run new-plugin`` writes packages that import these and nothing else of ascend-run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ascend_run import families, plugin_api
from ascend_run.plugin_api import AscendRunError
from ascend_run.tools.new_plugin.public_names import public_names


@attrs.frozen(kw_only=True)
class Page:
    """One page of the reference."""

    name: str
    title: str
    intro: str
    names: Mapping[str, Sequence[str]]
    """Module to import from -> its public names."""


_OFFERED: Final = public_names(plugin_api)


def _is_error(name: str) -> bool:
    value = getattr(plugin_api, name)
    return isinstance(value, type) and issubclass(value, AscendRunError)


PAGES: Final = (
    Page(
        name="records",
        title="Records, protocols and functions",
        intro="What hooks take and return, and what a plugin declares. Imported without torch.",
        names={"ascend_run.plugin_api": [name for name in _OFFERED if not _is_error(name)]},
    ),
    Page(
        name="errors",
        title="Errors",
        intro="Raise one of these for what the user can fix: it is printed as one message. Any\n"
        "other exception that leaves a hook is a bug, and keeps its traceback.",
        names={"ascend_run.plugin_api": [name for name in _OFFERED if _is_error(name)]},
    ),
    Page(
        name="families",
        title="Model families",
        intro="Build the record of a family from that of another one.",
        names={"ascend_run.families": families.__all__},
    ),
    Page(
        name="testing",
        title="Tests of a plugin",
        intro="The testing kit; [the testing kit](../testing-kit.md) is its guide.",
        names={
            "ascend_run.testing": ["TrainingRun", "run"],
            "ascend_run.testing.saved_checkpoint": ["SavedCheckpoint"],
            "ascend_run.testing.parity": ["Case", "Parity", "ParityError"],
            "ascend_run.testing.pool": ["GlooPool", "PoolError"],
            "ascend_run.testing.runtime": ["Trial", "RankOutcome", "Shard", "run_trial"],
            "ascend_run.testing.models": ["DENSE", "MOE", "samples"],
            "ascend_run.testing.effects": ["count_collectives", "count_operations"],
            "ascend_run.testing.offering": ["offered"],
            "ascend_run.entrypoints.cli": ["run"],
        },
    ),
    Page(
        name="tasks",
        title="Data of a task",
        intro="Token files as the samples of a task that predicts tokens.",
        names={"ascend_run.plugins.tasks.pretrain.token_files": ["token_datasets"]},
    ),
    Page(
        name="platforms",
        title="A platform on the CPU",
        intro="Bases for a platform whose ranks run on the host, or are emulated there.",
        names={
            "ascend_run.plugins.platforms.cpu": ["Cpu"],
            "ascend_run.plugins.platforms.cpu.options": ["CpuOptions"],
            "ascend_run.plugins.platforms.cpu.device": ["CpuDevice"],
        },
    ),
)
PUBLIC: Final = frozenset(
    (module, name) for page in PAGES for module, names in page.names.items() for name in names
)
"""(module, name) of everything that a plugin or its tests may import."""
