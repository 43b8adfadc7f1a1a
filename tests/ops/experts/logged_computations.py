"""What the dispatchers compute while something is exchanged, in a log beside the exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from ascend_run.ops.experts import all_gather_dispatcher, all_to_all_dispatcher, chunked_all_gather
from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher
from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher
from ascend_run.ops.experts.round_trip import RoundTrip
from ascend_run.ops.experts.token_copies import FusedPermutation, IndexedPermutation

LOGGED: list[tuple[Any, str, str]] = [
    (AllGatherDispatcher, "_local_choices", "find"),
    (all_gather_dispatcher, "sorted_choices", "sort"),
    (chunked_all_gather, "sorted_choices", "sort"),
    (all_gather_dispatcher, "local_rows", "place"),
    (chunked_all_gather, "local_rows", "place"),
    (AllToAllDispatcher, "_arrange", "arrange"),
    (FusedPermutation, "permute", "permute"),
    (IndexedPermutation, "permute", "permute"),
    (RoundTrip, "_swapped_sizes", "order"),
]
"""Owner, function, and its name in the log."""


@contextmanager
def logged_computations(log: list[str]) -> Iterator[None]:
    """Log where rows are found, sorted and permuted, unless nothing is to be done, and the gather
    of counts or choices with its wait: ``gather`` and ``gathered``."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, said in LOGGED:
            patch.setattr(owner, name, _logged(getattr(owner, name), log, said))
        for module in (all_gather_dispatcher, all_to_all_dispatcher):
            gathers = SimpleNamespace(all_gather_into_tensor=_logged_gather(log))
            patch.setattr(module, "dist", gathers)
        yield


def _logged(function: Callable[..., Any], log: list[str], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        place = len(log)
        out = function(*args)
        if out is not None:
            log.insert(place, name)
        return out

    return call


def _logged_gather(log: list[str]) -> Callable[..., Any]:
    def gather(*args: Any, **more: Any) -> Any:
        log.append("gather")
        work = dist.all_gather_into_tensor(*args, **more)

        def wait() -> None:
            log.append("gathered")
            work.wait()

        return SimpleNamespace(wait=wait)

    return gather
