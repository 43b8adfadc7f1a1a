"""Batched expert matmuls fused with their collectives over expert and tensor parallel ranks.

Every expert takes the same number of tokens (dropped or padded). The ranks of ``ep_group`` hold
different experts, those of ``tp_group`` different columns (rows, of the second matmul) of an
expert's matrix. ``shard_type`` is the dim along which tensor parallel ranks shard the tokens: 0 for
the hidden size, 1 for the tokens.

Source: MindSpeed's operator documentation, npu_all_to_all_all_gather_bmm and
npu_bmm_reduce_scatter_all_to_all. torch_npu has neither operator.
"""

# E experts in all, e = E / ep of this rank, C tokens of an expert from one expert parallel rank, H
# hidden size, M width of the experts, m = M / tp of this rank; A = ep * C tokens of one expert

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.elementwise.activations import activate
from ascend_run.ops.transfer.tensor_collectives import exchange, gather, reduce_scatter

HIDDEN: Final = 0
TOKENS: Final = 1
"""``shard_type``: tensor parallel ranks shard the hidden size, or the tokens."""


class Gathered(NamedTuple):
    """Outputs of the first matmul."""

    out: Tensor
    """[e, A, m], activated."""
    gathered: Tensor | None
    """[e, A, H]: the gathered tokens, if requested."""
    product: Tensor | None
    """[e, A, m]: before the activation, if requested and there is one."""


def all_to_all_all_gather_bmm(
    x: Tensor,
    weight_eHm: Tensor,
    ep_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    shard_type: Literal[0, 1] = TOKENS,
    activation: str | None = None,
    gathered: bool = False,
    product: bool = False,
) -> Gathered:
    """Send tokens to the ranks of their experts, all-gather them over tp, and multiply.

    Args:
        x: [E, C, H / tp] with ``shard_type`` 0, [E, C / tp, H] with 1.
        bias: [e, m] or [e, 1, m].
        gathered: Also return the gathered tokens; product: also return the values before the
            activation.

    Tokens of one expert are ordered by expert parallel rank, then as the tensor parallel ranks had
    them. Differentiable in x, weight and bias.

    Communication: an all-to-all and an all-gather; in backward a reduce-scatter and an all-to-all.
    """
    experts = x.unflatten(0, (ep_group.size(), -1))
    arrived = exchange(experts, ep_group).transpose(0, 1)  # [e, ep, C or C / tp, H / tp or H]
    whole = _joined(gather(arrived, 3 if shard_type == HIDDEN else 2, tp_group), shard_type)
    multiplied = torch.bmm(whole, weight_eHm)
    if bias is not None:
        multiplied = multiplied + bias.reshape(bias.shape[0], 1, -1)
    out = multiplied if activation is None else activate(multiplied, activation)
    before = multiplied if product and activation is not None else None
    return Gathered(out, whole if gathered else None, before)


def bmm_reduce_scatter_all_to_all(
    x_eAm: Tensor,
    weight_emH: Tensor,
    ep_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    shard_type: Literal[0, 1] = TOKENS,
) -> Tensor:
    """Apply the second matmul, reduce-scatter over tp, and return tokens to their ranks.

    Args:
        x_eAm: In the order of ``all_to_all_all_gather_bmm``.
        bias: [e, H / tp] with ``shard_type`` 0, [e, H] with 1, or with a 1 in the middle; added
            after the sum. With 1 it is equal on all tensor parallel ranks, and each rank's gradient
            covers its own tokens: their sum is the gradient.

    Returns:
        [E, C, H / tp] with ``shard_type`` 0, [E, C / tp, H] with 1.

    Differentiable in x, weight and bias. Communication: a reduce-scatter and an all-to-all; in
    backward an all-to-all and an all-gather.
    """
    ep, tp = ep_group.size(), tp_group.size()
    product = torch.bmm(x_eAm, weight_emH).unflatten(1, (ep, -1))  # [e, ep, C, H]
    if shard_type == HIDDEN:
        share = reduce_scatter(product.unflatten(3, (tp, -1)), 3, tp_group)
    else:
        share = reduce_scatter(product.unflatten(2, (tp, -1)), 2, tp_group)
    if bias is not None:
        share = share + bias.reshape(bias.shape[0], 1, 1, -1)
    return exchange(share.transpose(0, 1), ep_group).flatten(0, 1)


def _joined(x: Tensor, shard_type: int) -> Tensor:
    """Flatten gathered shards to [e, A, H], from [e, ep, C, tp, H / tp] or [e, ep, tp, C / tp,
    H]."""
    return x.flatten(3).flatten(1, 2) if shard_type == HIDDEN else x.flatten(1, 3)
