"""Count operations and collectives, so that tests fail for a plugin that does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

SeeOperation = Callable[[Any, Sequence[Any], Any], None]
"""Called after each operation with the operation, its positional arguments and its result."""


@classmethod  # type: ignore[misc]
def _graphs_stay_compiled(cls: type) -> bool:
    """Keep torch.compile active; under other dispatch modes it would run eagerly."""
    return True


@attrs.frozen
class CollectiveCall:
    """One call of an operation of ``torch.ops.c10d`` on this rank."""

    operation: str
    ranks: tuple[int, ...]
    """Global ranks of its process group."""
    nbytes: int
    """Size of this rank's input tensors."""


@attrs.define
class Collectives:
    """Collectives that this rank took part in."""

    calls: Counter[str] = attrs.field(factory=Counter)
    """Operation of ``torch.ops.c10d`` (``alltoall_base_``, ``allreduce_``, ``send``) -> calls."""
    sent_bytes: Counter[str] = attrs.field(factory=Counter)
    """Operation -> bytes of this rank's input tensors."""
    collective_calls: list[CollectiveCall] = attrs.field(factory=list)
    """All calls, in order."""

    def add(self, function: Any, arguments: Sequence[Any]) -> None:
        """Add a call of an operation of ``torch.ops.c10d``."""
        import torch
        from torch.utils._pytree import tree_leaves

        name, sent = function._opname, arguments[_sent_argument(function)]
        nbytes = sum(leaf.nbytes for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor))
        self.calls[name] += 1
        self.sent_bytes[name] += nbytes
        self.collective_calls.append(CollectiveCall(name, _group_ranks(arguments), nbytes))


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count every collective of torch.distributed inside the block.

    It uses a dispatch mode, which is slow: for tests only.
    """
    with count_both() as (_, seen):
        yield seen


@contextmanager
def count_operations() -> Iterator[Counter[str]]:
    """Count every operation that reaches torch's dispatcher inside the block, including backward,
    by name without overload (``mm``, ``_grouped_mm``, ``copy_`` ...)."""
    with count_both() as (seen, _):
        yield seen


@contextmanager
def count_both(see: SeeOperation | None = None) -> Iterator[tuple[Counter[str], Collectives]]:
    """Count operations and collectives at the same time.

    Args:
        see: Also called with every operation; it must not run operations itself.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    operations: Counter[str] = Counter()
    collectives = Collectives()

    class Watch(TorchDispatchMode):
        ignore_compile_internals = _graphs_stay_compiled

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            operations[function._opname] += 1
            if function.namespace == "c10d":
                collectives.add(function, args)
            result = function(*args, **(kwargs or {}))
            if see is not None:
                see(function, args, result)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield operations, collectives


def _sent_argument(function: Any) -> int:
    """Index of the input argument of a collective; in-place collectives have only one."""
    names = [argument.name for argument in function._schema.arguments]
    return next((i for i, name in enumerate(names) if name.startswith("input")), 0)


def _group_ranks(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Global ranks of the process group in a collective's arguments."""
    import torch
    import torch.distributed as dist

    boxed = next(a for a in arguments if isinstance(a, torch.ScriptObject))
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
