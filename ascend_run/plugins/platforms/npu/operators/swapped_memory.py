"""Memory of the host that the NPU addresses, and AdamW, which takes tensors in it.

The documentation of ``empty_with_swapped_memory`` lists the operators that take such tensors:
``fill_``, ``zero_``, ``npu_apply_adam_w``, and a codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_with_swapped_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of the NPU whose values, which are any, are in memory of the host."""
    out: Tensor = torch.ops.npu.empty_with_swapped_memory([*shape], dtype=dtype, device=device)
    return out


def apply_adam_w_(
    var: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Take a step of AdamW in place, of tensors of one shape and dtype.

    Args:
        m: First moment; v: second moment.
        beta1_power: ``beta1 ** (step - 1)``, with steps from 1; beta2_power alike.
    """
    torch.ops.npu.npu_apply_adam_w(
        beta1_power,
        beta2_power,
        lr,
        weight_decay,
        beta1,
        beta2,
        eps,
        grad,
        None,
        False,
        False,
        out=[var, m, v],
    )
