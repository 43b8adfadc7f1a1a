"""Graphs of each compiled function, on this torch and on one whose torch.compile has no limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ascend_run.ops.kernels.own_graphs import with_own_graphs

COMPILE = torch.compile


def older(model: Any = None, *, fullgraph: bool = False, dynamic: Any = None, backend: Any) -> Any:
    """torch.compile before 2.13, as far as it is used here."""
    return COMPILE(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)


def counted() -> tuple[Callable[..., Any], list[int]]:
    """A backend that runs graphs as they are, and the graphs that it made."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graphs))
        return graph.forward

    return backend, graphs


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 11])
def test_further_variants_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_older: bool
) -> None:
    if is_older:
        monkeypatch.setattr(torch, "compile", older)

    def form(x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1

    form.__code__ = form.__code__.replace()  # not that of another case, with which it shares graphs
    backend, graphs = counted()
    run = with_own_graphs(form, limit, backend=backend, dynamic=False)
    for size in (*range(2, 14), *range(2, 14)):
        assert torch.equal(run(torch.ones(size)), torch.full((size,), 3.0))
    assert len(graphs) == limit
    assert torch._dynamo.config.recompile_limit == 8


@pytest.mark.parametrize("is_older", [False, True])
def test_another_function_of_the_same_code_has_graphs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    if is_older:
        monkeypatch.setattr(torch, "compile", older)

    def form(x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1

    form.__code__ = form.__code__.replace()
    made = []
    for _ in range(2):
        backend, graphs = counted()
        run = with_own_graphs(form, 2, backend=backend, dynamic=False)
        for size in (2, 3, 4):
            run(torch.ones(size))
        made.append(len(graphs))
    isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    assert made == ([2, 2] if isolates else [2, 0])
