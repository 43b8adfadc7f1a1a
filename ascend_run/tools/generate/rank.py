"""Ranks of a model that are started to generate: rank 0 runs the command, the others follow it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from .model_options import ModelOptions

if TYPE_CHECKING:
    from .answering import Question

_TARGET: Final = "ascend_run.tools.generate.rank:run_rank"
_THREADS: Final = "OMP_NUM_THREADS"


def ran_on_ranks(question: Question) -> bool:
    """Run the command again on ranks that are started here, if the model is to be on several.

    Returns:
        Whether it ran; otherwise this process answers, as the only rank or the first one.

    Raises:
        AscendRunError: The model cannot be read, or be on these ranks; none has been started.
        RankFailure: A rank failed; all have been terminated.
    """
    from ascend_run.core.rank.rank_environment import find_rank_environment

    nproc = question.model_options.world_size
    if nproc == 1 or find_rank_environment(os.environ) is not None:
        return False
    from ascend_run.launch.agent import launch_ranks
    from ascend_run.launch.options import LaunchOptions

    from .model import require_layout

    require_layout(question.model, question.options, question.model_options)
    os.environ.setdefault(_THREADS, str(max(1, (os.cpu_count() or 1) // nproc)))
    request = {
        "parameters": _as_json(click.get_current_context().params),
        "model": str(question.model),
        "dtype": question.dtype,
        "options": _as_json(attrs.asdict(question.options)),
        "model_options": attrs.asdict(question.model_options),
    }
    launch_ranks(_TARGET, request, LaunchOptions(nproc=nproc))
    return True


def run_rank(request: Mapping[str, Any]) -> None:
    """Run the command on rank 0; on another one, compute what rank 0 asks for."""
    from ascend_run.core.rank.rank_environment import RankEnvironment

    if RankEnvironment.of_this_process().rank == 0:
        from .command import command

        assert command.callback is not None
        command.callback(**_of_json(request["parameters"]))
        return
    from ascend_run.tools.convert.source_options import SourceOptions

    from .answering import DTYPES
    from .model import follow_model

    follow_model(
        Path(request["model"]),
        SourceOptions(**_of_json(request["options"])),
        None if request["dtype"] is None else DTYPES[request["dtype"]],
        ModelOptions(**request["model_options"]),
    )


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"path": str(value)} if isinstance(value, Path) else value
        for name, value in values.items()
    }


def _of_json(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = Path(value["path"])
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return found
