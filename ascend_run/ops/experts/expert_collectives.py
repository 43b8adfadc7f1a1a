"""Experts' products beside the exchange of their tokens, over expert and tensor parallel ranks.

Every expert takes the same number of tokens (dropped or padded ones). The ranks of ``ep_group``
hold different experts, those of ``tp_group`` different columns (rows, of the second product) of
one expert's matrix. The sharded dimension says how tensor parallel ranks split the tokens outside:
0 by their hidden size, 1 by their number.

Source: MindSpeed's operator documentation, npu_all_to_all_all_gather_bmm and
npu_bmm_reduce_scatter_all_to_all. torch_npu has neither operator.
"""

# E experts in all, e = E / ep of this rank, C tokens of an expert from one expert parallel rank,
# H hidden size, M width of the experts, m = M / tp of this rank; A tokens of one expert here,
# ep * C of them

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.elementwise.activations import activate
from ascend_run.ops.transfer.tensor_collectives import exchange, gather, reduce_scatter

HIDDEN: Final = 0
TOKENS: Final = 1
"""``shard_type``: tensor parallel ranks split the hidden size, or the tokens."""


class Gathered(NamedTuple):
    """What the first product answers."""

    out: Tensor
    """[e, A, m], activated."""
    gathered: Tensor | None
    """[e, A, H]: the tokens that were multiplied, where asked for."""
    product: Tensor | None
    """[e, A, m]: before the activation, where asked for and there is one."""


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
    """Tokens to the ranks of their experts, whole again over tp, and multiplied.

    Args:
        x: [E, C, H / tp] with ``shard_type`` 0, [E, C / tp, H] with 1.
        bias: [e, m] or [e, 1, m].
        gathered: Answer the gathered tokens as well; product: the product before the activation.

    Tokens of one expert stand by expert parallel rank, then as the tensor parallel ranks had them.
    Differentiable in x, weight and bias. Messages: an all-to-all and an all-gather; in backward a
    reduce-scatter and an all-to-all.
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
    """The second product, summed over tp, each rank its share, and tokens back to their ranks.

    Args:
        x_eAm: In the order that ``all_to_all_all_gather_bmm`` gives.
        bias: [e, H / tp] with ``shard_type`` 0, [e, H] with 1, or with a 1 in the middle; added
            after the sum. With 1 it is the same on all tensor parallel ranks and each one's
            gradient is of its own tokens: their sum is the gradient.

    Returns:
        [E, C, H / tp] with ``shard_type`` 0, [E, C / tp, H] with 1.

    Differentiable in x, weight and bias. Messages: a reduce-scatter and an all-to-all; in backward
    an all-to-all and an all-gather.
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
    """[e, A, H] of the gathered pieces: [e, ep, C, tp, H / tp] or [e, ep, tp, C / tp, H]."""
    return x.flatten(3).flatten(1, 2) if shard_type == HIDDEN else x.flatten(1, 3)
