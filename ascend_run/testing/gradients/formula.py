"""Compare attention kernels with the contract's formula, for each feature that they declare."""

# S queries, J keys, B batch, N query heads, D width of q and k, E width of v

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import AttentionKernel, AttentionSpec, Mask
from ascend_run.testing.tensors import relative_error

from .kernels import problems_of


def kernel_errors(kernel: AttentionKernel) -> dict[str, float]:
    """Return the largest error of the output in each problem that a kernel solves, relative to the
    largest value. Dropout is left out: its mask is the kernel's own."""
    errors = {}
    for problem in problems_of(kernel.features):
        if problem.dropout is not None:
            continue
        inputs, spec = problem.draw()
        spec = attrs.evolve(spec, bias=inputs.get("bias"), sinks=inputs.get("sinks"))
        with torch.no_grad():
            out = kernel.forward(inputs["q"], inputs["k"], inputs["v"], spec).out
        expected = attention(inputs, spec).reshape(out.shape)
        errors[problem.label] = relative_error(out, expected)
    return errors


def attention(inputs: Mapping[str, Tensor], spec: AttentionSpec) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``, [S, B, N, E], with all scores in memory; a
    packed input is a batch of one."""
    tensors = (inputs[name] for name in "qkv")
    q_SBND, k, v = (x if x.dim() == 4 else x.unsqueeze(1) for x in tensors)
    heads = q_SBND.shape[2] // k.shape[2]
    q_BNSD = q_SBND.permute(1, 2, 0, 3)
    k_BNJD, v_BNJE = (x.repeat_interleave(heads, dim=2).permute(1, 2, 0, 3) for x in (k, v))
    score_BNSJ = spec.scale * q_BNSD @ k_BNJD.mT
    query_S, key_J = _places(spec.mask, score_BNSJ)
    distance_SJ = query_S[:, None] - key_J
    if spec.softcap is not None:
        score_BNSJ = spec.softcap * torch.tanh(score_BNSJ / spec.softcap)
    if spec.bias is not None:
        score_BNSJ = score_BNSJ + spec.bias
    if spec.position_bias is not None:
        slope_N = spec.position_bias.slopes
        score_BNSJ = score_BNSJ - slope_N[:, None, None] * distance_SJ.abs()
    score_BNSJ = score_BNSJ.masked_fill(~_visible(spec.mask, query_S, key_J), -torch.inf)
    if spec.sinks is not None:
        sink_BNS1 = spec.sinks[:, None, None].expand(*score_BNSJ.shape[:3], 1)
        score_BNSJ = torch.cat((score_BNSJ, sink_BNS1), dim=-1)
    share_BNSJ = score_BNSJ.softmax(dim=-1)[..., : len(key_J)]
    return (share_BNSJ @ v_BNJE).permute(2, 0, 1, 3)


def _places(mask: Mask, score_BNSJ: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys."""
    queries, keys = score_BNSJ.shape[2:]
    return mask.query_start + torch.arange(queries), mask.key_start + torch.arange(keys)


def _visible(mask: Mask, query_S: Tensor, key_J: Tensor) -> Tensor:
    """Whether a query sees a key, [S, J]."""
    behind_SJ = query_S[:, None] - key_J
    seen_SJ = behind_SJ >= 0 if mask.causal else torch.ones_like(behind_SJ, dtype=torch.bool)
    left, right = mask.window or (-1, -1)
    seen_SJ = seen_SJ & (behind_SJ <= left) if left >= 0 else seen_SJ
    seen_SJ = seen_SJ & (-behind_SJ <= right) if right >= 0 else seen_SJ
    if mask.document_ends is not None:
        ends = torch.tensor(mask.document_ends)
        query, key = (torch.bucketize(place, ends, right=True) for place in (query_S, key_J))
        seen_SJ = seen_SJ & (query[:, None] == key)
    return seen_SJ
