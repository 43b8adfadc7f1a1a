"""The optimizer; imports torch."""

# A, B = rows and columns of a matrix, or of a tensor-parallel rank's shard of one; E = experts of a
# rank; N = blocks of fused rows; P = tensor-parallel ranks

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.elementwise.adamw import adamw_step_

from .newton_schulz import orthogonalized
from .parameters import ADAMW, ALGORITHM, MUON, ROWS, FusedRows, experts_at_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from . import MuonConfig


@attrs.frozen(eq=False)
class TensorParallelRanks:
    """Process groups over which matrices are sharded."""

    dense: ProcessGroup
    experts: ProcessGroup

    def of(self, parameter: Tensor) -> ProcessGroup | None:
        """Return the ranks that have shards of a parameter; None if it is not sharded."""
        group = self.experts if parameter.ndim > 2 else self.dense
        is_sharded = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
        return group if is_sharded else None


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the parameter groups whose option ``algorithm`` is ``muon``; torch's fused AdamW for
    the others. A parameter without gradient has no step. Ranks that have shards of a matrix gather
    its momentum, and each orthogonalizes all of it.

    Args:
        options: Of Muon; the others are AdamW's.
        ranks: None: no matrix is sharded.
    """

    def __init__(
        self,
        params: Any,
        *,
        options: MuonConfig,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        ranks: TensorParallelRanks | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, ALGORITHM: ADAMW})
        self.options, self.ranks = options, ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step; there is no closure."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group[ALGORITHM] == MUON:
                for parameter in params:
                    self._muon_step(group, parameter, parameter.grad)
            elif params:
                adamw_step_(group, params, [self._adamw_state(p) for p in params])

    def _muon_step(self, group: dict[str, Any], parameter_AB: Tensor, grad_AB: Tensor) -> None:
        options, state = self.options, self.state[parameter_AB]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter_AB)
        momentum_AB = state["momentum_buffer"]
        momentum_AB.lerp_(grad_AB, 1 - options.momentum)
        lr, rows = group["lr"] * options.lr_multiplier, group[ROWS]
        parameter_AB.mul_(1 - lr * group["weight_decay"])
        shared_by = self.ranks.of(parameter_AB) if self.ranks else None
        if shared_by is not None:
            self._move_shard(parameter_AB, momentum_AB, grad_AB, lr, rows, shared_by)
            return
        of_each = (matrices(t, rows) for t in (parameter_AB, momentum_AB, grad_AB))
        for target, momentum, grad in zip(*of_each, strict=True):
            self._move(target, momentum, grad, lr)

    def _move(self, target: Tensor, momentum: Tensor, grad: Tensor, lr: float) -> None:
        """Subtract the orthogonalized update, scaled, from whole matrices: of ``matrices``."""
        # Nothing else refers to the update, so that the iterations free it.
        update_AB = orthogonalized(
            self._update(momentum, grad).to(self._ns_dtype(target)).flatten(-3, -2),
            self.options.num_ns_steps,
        )
        scale = self._scale(*update_AB.shape[-2:])
        target.add_(update_AB.reshape(target.shape), alpha=-lr * scale)

    def _move_shard(
        self,
        parameter_AB: Tensor,
        momentum_AB: Tensor,
        grad_AB: Tensor,
        lr: float,
        rows: FusedRows | None,
        shared_by: ProcessGroup,
    ) -> None:
        """Do the same with this rank's shard of matrices, of which each rank gathers the update."""
        ranks, rank = shared_by.size(), shared_by.rank()
        shards = parameter_AB.new_empty(
            ranks, *parameter_AB.shape, dtype=self._ns_dtype(parameter_AB)
        )
        shards[rank].copy_(self._update(momentum_AB, grad_AB))
        dist.all_gather_into_tensor(shards.flatten(0, 1), shards[rank], group=shared_by)
        has_rows = parameter_AB.partition_dim == parameter_AB.ndim - 2  # type: ignore[attr-defined]
        for matrix in matrices_of_shards(shards if has_rows else shards.mT, rows):
            orthogonalize_(matrix, self.options.num_ns_steps)
        num_rows, num_columns = parameter_AB.shape[-2:]
        if has_rows:
            scale_A = parameter_AB.new_empty(ranks, num_rows, 1)
            for scale in matrices_of_shards(scale_A, rows):
                scale.fill_(self._scale(scale.numel(), num_columns))
            parameter_AB.addcmul_(shards[rank], scale_A[rank], value=-lr)
        else:
            alpha = -lr * self._scale(num_rows, ranks * num_columns)
            parameter_AB.add_(shards[rank], alpha=alpha)

    def _update(self, momentum: Tensor, grad: Tensor) -> Tensor:
        """Return what is orthogonalized."""
        return grad.lerp(momentum, self.options.momentum) if self.options.nesterov else momentum

    def _ns_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.options.ns_dtype == "bfloat16" else parameter.dtype

    def _scale(self, num_rows: int, num_columns: int) -> float:
        """Return the scale of an update; see ``MuonConfig``."""
        ratio = num_rows / num_columns
        of_mode = {
            "spectral": math.sqrt(max(num_rows, num_columns)),
            "unit_rms_norm": math.sqrt(ratio),
            "shape_scaling": math.sqrt(max(1.0, ratio)),
        }
        return self.options.extra_scale_factor * of_mode[self.options.scale_mode]

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def matrices(tensor_AB: Tensor, rows: FusedRows | None) -> Iterator[Tensor]:
    """Yield views of the matrices of a parameter, each [N, A / N, B]; of stacked ones, [E, N,
    A / N, B] of as many experts as are orthogonalized at once."""
    num_blocks = rows.num_blocks if rows else 1
    return _of_blocks(tensor_AB.unflatten(-2, (num_blocks, -1)), rows)


def matrices_of_shards(shards: Tensor, rows: FusedRows | None) -> Iterator[Tensor]:
    """Yield the same of the rows of all ranks, [P, A / P, B] or [P, E, A / P, B]."""
    if rows is None or rows.by_rank:
        return _of_blocks(shards.movedim(0, -3), rows)
    return matrices(shards.flatten(0, 1), rows)


def _of_blocks(blocks: Tensor, rows: FusedRows | None) -> Iterator[Tensor]:
    shares = rows.shares if rows else (1,)
    unit = blocks.shape[-2] // sum(shares)
    at_once = experts_at_once(blocks[0].numel()) if blocks.ndim > 3 else len(blocks)
    for stack in blocks.split(at_once):
        yield from stack.split([unit * share for share in shares], dim=-2)


def orthogonalize_(matrix: Tensor, num_steps: int) -> None:
    """Overwrite one of ``matrices``."""
    matrix.copy_(orthogonalized(matrix.flatten(-3, -2), num_steps).reshape(matrix.shape))
