"""Rows for ``torch.distributed``: gloo instead of NCCL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.transfer.unequal_parts import padded_all_gather, padded_reduce_scatter
from ascend_run.plugin_api import Patch

from .rows import row


def _backend(name: object) -> Any:
    return "gloo" if isinstance(name, str) and "nccl" in name else name


class GroupCache:
    """Create each process group once, and reuse it for every purpose.

    Megatron creates a group for every purpose, some twenty in a run, most of them of the same
    ranks, and never frees them. With gloo each costs sockets and three threads, one of which wakes
    up a hundred times per second; ranks call their collectives in one order, so purposes may share
    a group. A group is reused as long as its world exists and it was not destroyed.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._groups: dict[tuple[object, ...], dist.ProcessGroup | int] = {}
        self._world: dist.ProcessGroup | None = None

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: datetime.timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: object = None,
    ) -> dist.ProcessGroup | int:
        """Replace torch.distributed.new_group; NCCL's options and device are dropped."""
        world = dist.group.WORLD
        if world is not self._world:
            self._groups.clear()
            self._world = world
        members = None if ranks is None else tuple(ranks)
        key = (members, _backend(backend), timeout, use_local_synchronization)
        group = self._groups.get(key)
        if group is None or not self._alive(group):
            group = self._plain(
                ranks=ranks,
                timeout=timeout,
                backend=_backend(backend),
                use_local_synchronization=use_local_synchronization,
                group_desc=group_desc,
            )
            self._groups[key] = group
        return group

    @staticmethod
    def _alive(group: dist.ProcessGroup | int) -> bool:
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        return outside or group in dist.distributed_c10d._world.pg_map


def _init_process_group(plain: Any) -> Any:
    def init_process_group(backend: object = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return plain(_backend(backend), *args, **kwargs)

    return init_process_group


def _all_reduce(plain: Any) -> Any:
    def all_reduce(
        tensor: Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            # Divide first: inside a coalescing manager, the sum is computed only when it closes.
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return plain(tensor, op=op, group=group, async_op=async_op)

    return all_reduce


def _reduce_scatter_tensor(plain: Any) -> Any:
    def reduce_scatter_tensor(
        output: Tensor,
        input: Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            input = input / dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return plain(output, input, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def distributed_rows() -> tuple[Patch, ...]:
    """Return the rows."""
    scatter = "torch.distributed:reduce_scatter_tensor"
    average = "gloo has no AVG"
    uneven = "gloo needs equal rows on every rank; tokens per expert rank differ"
    bound = average + "; bound to torch's when the module was imported"
    rows: tuple[tuple[str, object, str], ...] = (
        (
            "init_process_group",
            _init_process_group,
            "replaces nccl by gloo, which rejects NCCL's device and options",
        ),
        (
            "new_group",
            lambda plain: GroupCache(plain).new_group,
            "as above; and groups are never freed",
        ),
        ("all_reduce", _all_reduce, average),
        ("reduce_scatter_tensor", _reduce_scatter_tensor, average),
        ("all_gather", padded_all_gather, uneven),
        ("reduce_scatter", padded_reduce_scatter, uneven),
    )
    return (
        *(row(f"torch.distributed:{name}", new, why, wraps=True) for name, new, why in rows),
        row(
            "megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func",
            _reduce_scatter_tensor,
            bound,
            wraps=True,
            same=scatter,
        ),
    )
