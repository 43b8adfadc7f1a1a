"""Rows on ``torch.distributed``: gloo where Megatron asks for NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .substitution import Substitute, original


def _backend(name: Any) -> Any:
    return "gloo" if isinstance(name, str) and "nccl" in name else name


class GroupCache:
    """``new_group`` that makes each group of ranks once, whatever it is for.

    Megatron makes a group for every purpose, some twenty in a run, most of them of the same ranks,
    and never frees them. On gloo each costs sockets and three threads, one of which wakes up a
    hundred times a second; ranks call their collectives in one order, so purposes may share. A
    group is reused while the world it was made in lives and it was not destroyed.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._world: Any = None

    def new_group(
        self,
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
    ) -> Any:
        """torch.distributed.new_group's arguments; NCCL's options and device are dropped."""
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
    def _alive(group: Any) -> bool:
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        return outside or group in dist.distributed_c10d._world.pg_map


def _init_process_group(plain: Any) -> Any:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return plain(_backend(backend), *args, **kwargs)

    return init_process_group


def _all_reduce(plain: Any) -> Any:
    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            # Before the sum: inside a coalescing manager the sum is taken only when it closes.
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return plain(tensor, op=op, group=group, async_op=async_op)

    return all_reduce


def _reduce_scatter_tensor(plain: Any) -> Any:
    def reduce_scatter_tensor(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            input = input / dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return plain(output, input, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def _all_gather(plain: Any) -> Any:
    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [output.shape[0] if output.dim() else 1 for output in tensor_list]
        if len(set(rows)) == 1:
            return plain(tensor_list, tensor, group=group, async_op=async_op)
        most = max(rows)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        plain(gathered, padded, group=group)
        for output, whole in zip(tensor_list, gathered, strict=True):
            output.copy_(whole[: output.shape[0]])
        return None

    return all_gather


def _reduce_scatter(plain: Any) -> Any:
    def reduce_scatter(
        output: Tensor,
        input_list: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        rows = [part.shape[0] if part.dim() else 1 for part in input_list]
        if len(set(rows)) == 1:
            return plain(output, input_list, op=op, group=group, async_op=async_op)
        padded = [part.new_zeros((max(rows), *part.shape[1:])) for part in input_list]
        for whole, part in zip(padded, input_list, strict=True):
            whole[: part.shape[0]] = part
        sums = torch.empty_like(padded[0])
        plain(sums, padded, op=op, group=group)
        output.copy_(sums[: output.shape[0]])
        return None

    return reduce_scatter


def distributed_substitutes() -> tuple[Substitute, ...]:
    """The rows."""
    root = "torch.distributed"
    cache = GroupCache(original(f"{root}:new_group"))
    reduce_scatter = _reduce_scatter_tensor(original(f"{root}:reduce_scatter_tensor"))
    average = "gloo has no AVG"
    uneven = "gloo wants as many rows of every rank; the tokens of an expert's ranks differ"
    return (
        Substitute(
            f"{root}:init_process_group",
            _init_process_group(original(f"{root}:init_process_group")),
            "nccl means gloo; NCCL's device and options are refused by it",
        ),
        Substitute(f"{root}:new_group", cache.new_group, "as above; and groups are never freed"),
        Substitute(f"{root}:all_reduce", _all_reduce(original(f"{root}:all_reduce")), average),
        Substitute(f"{root}:reduce_scatter_tensor", reduce_scatter, average),
        Substitute(f"{root}:all_gather", _all_gather(original(f"{root}:all_gather")), uneven),
        Substitute(
            f"{root}:reduce_scatter", _reduce_scatter(original(f"{root}:reduce_scatter")), uneven
        ),
        Substitute(
            "megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func",
            reduce_scatter,
            average + "; bound to torch's when the module was imported",
        ),
    )
