"""Let ranks compile equal graphs one after another.

The first one saves what it compiled in torch's cache, where the others find it. Compiling at the
same time, each would do all of the work, on a machine with fewer processors than ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule


def compile_in_turn() -> None:
    """Let this process wait before it compiles a graph, forward or backward, while another process
    with the same cache compiles an equal one. Nothing changes where inductor is not imported
    yet."""
    compile_fx: Any = sys.modules.get("torch._inductor.compile_fx")
    if compile_fx is None:
        return
    compile_graph = compile_fx._compile_fx_inner

    def wait_and_compile(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        with _turn(_digest(gm, example_inputs)):
            return compile_graph(gm, example_inputs, **options)

    compile_fx._compile_fx_inner = wait_and_compile


@contextmanager
def _turn(graph: str) -> Iterator[None]:
    """Wait for the processes that compile this graph; the lock of one that dies is released."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir(), "turns")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / graph, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _digest(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return the hash of a graph's code and of what its inputs look like."""
    import torch

    shown = [
        (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]
    return hashlib.sha256(f"{graph.code}\n{shown}".encode()).hexdigest()[:32]
