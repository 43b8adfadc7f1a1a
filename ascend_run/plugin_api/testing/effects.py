"""What a plugin did, beside what came out: a plugin that does nothing must fail its tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs


@classmethod  # type: ignore[misc]
def _graphs_stay_compiled(cls: type) -> bool:
    """Under any other mode torch.compile would run eagerly, and a test would not test it."""
    return True


@attrs.frozen
class SentMessage:
    """One call of an operation of ``torch.ops.c10d`` on this rank."""

    operation: str
    ranks: tuple[int, ...]
    """Of its process group, as the default group numbers them."""
    nbytes: int
    """Of the tensors that this rank put in."""


@attrs.define
class Collectives:
    """Messages that this rank took part in."""

    calls: Counter[str] = attrs.field(factory=Counter)
    """Operation of ``torch.ops.c10d`` (``alltoall_base_``, ``allreduce_``, ``send``) -> calls."""
    sent_bytes: Counter[str] = attrs.field(factory=Counter)
    """Operation -> bytes of the tensors that this rank put in."""
    messages: list[SentMessage] = attrs.field(factory=list)
    """Each of them, in order."""

    def add(self, function: Any, arguments: Sequence[Any]) -> None:
        """A call of an operation of ``torch.ops.c10d``."""
        import torch
        from torch.utils._pytree import tree_leaves

        name, sent = function._opname, arguments[_sent_argument(function)]
        nbytes = sum(leaf.nbytes for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor))
        self.calls[name] += 1
        self.sent_bytes[name] += nbytes
        self.messages.append(SentMessage(name, _group_ranks(arguments), nbytes))


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count every collective of torch.distributed inside the block, whoever calls it.

    It watches the dispatcher, so it slows everything down: for tests only.
    """
    with count_both() as (_, seen):
        yield seen


@contextmanager
def count_operations() -> Iterator[Counter[str]]:
    """Count every operation that reaches torch's dispatcher inside the block, by its name
    without overload (``mm``, ``_grouped_mm``, ``copy_`` ...); backward included."""
    with count_both() as (seen, _):
        yield seen


@contextmanager
def count_both() -> Iterator[tuple[Counter[str], Collectives]]:
    """What ``count_operations`` and ``count_collectives`` count, in one pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    operations: Counter[str] = Counter()
    collectives = Collectives()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        ignore_compile_internals = _graphs_stay_compiled

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            operations[function._opname] += 1
            if function.namespace == "c10d":
                collectives.add(function, args)
            return function(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        yield operations, collectives


def _sent_argument(function: Any) -> int:
    """Which argument of a collective is put in; in-place ones have but one."""
    names = [argument.name for argument in function._schema.arguments]
    return next((i for i, name in enumerate(names) if name.startswith("input")), 0)


def _group_ranks(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Ranks of the process group among a collective's arguments."""
    import torch
    import torch.distributed as dist

    boxed = next(a for a in arguments if isinstance(a, torch.ScriptObject))
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
