"""Ranks that compile the same graph: the first one does the work, and each has the code."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch._dynamo.utils import counters

from ascend_run.testing.pool import GlooPool

RANKS = 3
GRAPHS = 2
"""Forward and backward."""


def _formula(x: Tensor) -> Tensor:
    return torch.sin(x * 0.8137) + x.square()


def compile_formula() -> tuple[int, int, float]:
    """Return the graphs that this rank compiled and those that it found, and the largest error of
    the gradient."""
    x = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(_formula)
    counters.clear()
    distributed.barrier()
    compiled(x).sum().backward()
    exact = 0.8137 * torch.cos(x.detach() * 0.8137) + 2.0 * x.detach()
    assert x.grad is not None
    found = counters["inductor"]
    error = (x.grad - exact).abs().max().item()
    return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], error


def test_a_graph_is_compiled_by_one_rank_and_found_by_the_others() -> None:
    with GlooPool() as pool:
        compiled, found, errors = zip(*pool.run(compile_formula, RANKS, timeout=200), strict=True)
    assert sum(compiled) == GRAPHS
    assert sum(found) == (RANKS - 1) * GRAPHS
    assert max(errors) <= 1e-15
