"""The optimizer; imports torch."""

# A, B = rows and columns of a matrix, or of a tensor-parallel rank's shard of one; E = experts of a
# rank; N = blocks of fused rows

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_step_
from ascend_run.ops.transfer.tensor_collectives import gather

from .newton_schulz import orthogonalized
from .parameters import ADAMW, ALGORITHM, MUON, ROWS, FusedRows

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
        update_AB = momentum_AB
        if options.nesterov:
            update_AB = grad_AB.lerp(momentum_AB, options.momentum)
        lr = group["lr"] * options.lr_multiplier
        parameter_AB.mul_(1 - lr * group["weight_decay"])
        shared_by = self.ranks.of(parameter_AB) if self.ranks else None
        if shared_by is None:
            self._add_directions(parameter_AB, update_AB, group[ROWS], lr)
            return
        dim: int = parameter_AB.partition_dim  # type: ignore[attr-defined]
        shards = gather(update_AB.to(self._ns_dtype(parameter_AB)), 0, shared_by)
        whole_AB = torch.cat(shards.unbind(), dim)
        rows = _of_all_ranks(group[ROWS], shared_by.size())
        moved_AB = torch.zeros_like(whole_AB, dtype=parameter_AB.dtype)
        self._add_directions(moved_AB, whole_AB, rows, lr)
        parameter_AB.add_(moved_AB.chunk(shared_by.size(), dim)[shared_by.rank()])

    def _add_directions(
        self, to_AB: Tensor, update_AB: Tensor, rows: FusedRows | None, lr: float
    ) -> None:
        """Subtract the orthogonalized matrices of an update, scaled, from a whole parameter."""
        options, dtype = self.options, self._ns_dtype(to_AB)
        for target, update in zip(matrices(to_AB, rows), matrices(update_AB, rows), strict=True):
            whole_AB = update.flatten(-3, -2)
            scale = options.extra_scale_factor * _scale(options.scale_mode, *whole_AB.shape[-2:])
            direction_AB = orthogonalized(whole_AB, options.num_ns_steps, dtype)
            target.add_(direction_AB.reshape(target.shape), alpha=-lr * scale)

    def _ns_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.options.ns_dtype == "bfloat16" else parameter.dtype

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def matrices(tensor_AB: Tensor, rows: FusedRows | None) -> tuple[Tensor, ...]:
    """Return views of the matrices of a parameter, [N, A / N, B] each, or [E, N, A / N, B]."""
    if rows is None:
        return (tensor_AB.unsqueeze(-3),)
    blocks = tensor_AB.unflatten(-2, (rows.num_blocks, -1))
    unit = blocks.shape[-2] // sum(rows.shares)
    found: tuple[Tensor, ...] = blocks.split([unit * share for share in rows.shares], dim=-2)
    return found


def _of_all_ranks(rows: FusedRows | None, size: int) -> FusedRows | None:
    """Return the rows of a gathered parameter."""
    if rows is None or not rows.by_rank:
        return rows
    return attrs.evolve(rows, num_blocks=rows.num_blocks * size)


def _scale(mode: str, num_rows: int, num_columns: int) -> float:
    """Return the scale of an update; see ``MuonConfig.scale_mode``."""
    if mode == "spectral":
        return math.sqrt(max(num_rows, num_columns))
    ratio = num_rows / num_columns
    return math.sqrt(max(1.0, ratio) if mode == "shape_scaling" else ratio)
