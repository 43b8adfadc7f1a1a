"""Fused attention, forward and backward, as documented."""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def visible(
    num_queries: int, num_keys: int, mask: Tensor | None, mode: int, before: int, after: int
) -> Tensor:
    """Which scores count, [S, J]: ``sparse_mode`` by its documented meaning.

    0 without a mask: all; 2: the triangle from the upper left corner; 3: the one to the lower
    right corner; 4: the band between ``before`` and ``after`` keys of the diagonal that ends in
    the lower right corner.
    """
    if mask is None:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    assert mask.shape == (2048, 2048)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, torch.ones_like(mask).triu(1)), "the compressed mask is a triangle"
    query = torch.arange(num_queries)[:, None]
    key = torch.arange(num_keys)
    if mode == 2:
        return key <= query
    shift = num_keys - num_queries
    if mode == 3:
        return key <= query + shift
    assert mode == 4, f"sparse_mode {mode} is not written down here"
    return (key <= query + shift + after) & (key >= query + shift - before)


def _blocks(
    query: Tensor, key: Tensor, heads: int, layout: str, ends: tuple[Any, Any]
) -> list[tuple[Any, Any]]:
    """Indices of q and k (into [B, S, N, D] or [T, N, D]) that see each other."""
    if layout == "SBH":
        return [(slice(None), slice(None))]
    assert layout == "TND"
    pairs, start = [], (0, 0)
    for end in zip(*ends, strict=True):
        pairs.append((slice(start[0], end[0]), slice(start[1], end[1])))
        start = end
    assert start == (query.shape[0], key.shape[0])
    return pairs


def _split(x: Tensor, heads: int, layout: str) -> Tensor:
    """[B, S, N, D]; a packed sequence is a batch of one."""
    if layout == "TND":
        return x.unsqueeze(0)
    return x.unflatten(2, (heads, -1)).transpose(0, 1)


def _join(x_BSND: Tensor, layout: str) -> Tensor:
    return x_BSND.squeeze(0) if layout == "TND" else x_BSND.transpose(0, 1).flatten(2)


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """[B, N, S, J], -inf where hidden; statistics are float32, or float64 for float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = scale * torch.einsum("bsnd,bjnd->bnsj", q.to(wide), k)
    assert bool(seen.any(-1).all()), "a row of the mask hides every key"
    return scores.masked_fill(~seen, -torch.inf)


def _check(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    assert query.is_contiguous()
    assert key.shape == value.shape, "key and value have one shape"
    assert query.dtype == key.dtype == value.dtype
    for name in ("pse", "padding_mask", "prefix", "sink", "dropout_mask"):
        assert options.get(name) is None, f"{name} is not written down here"
    assert options.get("keep_prob", 1.0) == 1.0


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Any = None,
    dropout_mask: Any = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    unused = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    _check(query, key, value, {**unused, "dropout_mask": dropout_mask, "keep_prob": keep_prob})
    assert softmax_layout == ("TND" if input_layout == "TND" else "")
    q = _split(query, head_num, input_layout)
    groups = key.shape[1] if input_layout == "TND" else key.shape[2] // q.shape[3]
    k, v = (_split(t, groups, input_layout) for t in (key, value))
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    largest = q.new_empty((q.shape[0], head_num, q.shape[1]), dtype=wide)
    total = torch.empty_like(largest)
    ends = (actual_seq_qlen, actual_seq_kvlen)
    for rows, columns in _blocks(query, key, head_num, input_layout, ends):
        some, keys, values = q[:, rows], k[:, columns], v[:, columns]
        seen = visible(
            some.shape[1], keys.shape[1], atten_mask, sparse_mode, pre_tockens, next_tockens
        )
        scores = _scores(some, keys, scale, seen)
        part_largest = scores.amax(-1)
        terms = (scores - part_largest.unsqueeze(-1)).exp()
        part_total = terms.sum(-1)
        spread = values.to(wide).repeat_interleave(head_num // groups, dim=2)
        product = torch.einsum("bnsj,bjnd->bsnd", terms / part_total.unsqueeze(-1), spread)
        out[:, rows], largest[:, :, rows], total[:, :, rows] = (
            product.to(q.dtype),
            part_largest,
            part_total,
        )
    statistics = [_repeated(t, input_layout) for t in (largest, total)]
    return _join(out, input_layout), *statistics, query.new_empty(0), 0, 0, 0


def _repeated(x_BNS: Tensor, layout: str) -> Tensor:
    """[B, N, S, 8], or [T, N, 8]."""
    x = x_BNS.squeeze(0).t() if layout == "TND" else x_BNS
    return x.unsqueeze(-1).expand(*x.shape, 8).contiguous()


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    softmax_layout: str = "",
    **options: Any,
) -> tuple[Any, ...]:
    """The softmax is taken again from the statistics that are given, whatever made them."""
    _check(query, key, value, options)
    assert softmax_layout == ("TND" if input_layout == "TND" else "")
    assert dy.shape == query.shape == attention_in.shape
    q, out, dout = (_split(t, head_num, input_layout) for t in (query, attention_in, dy))
    groups = key.shape[1] if input_layout == "TND" else key.shape[2] // q.shape[3]
    k, v = (_split(t, groups, input_layout) for t in (key, value))
    wide = torch.promote_types(q.dtype, torch.float32)
    per_group = head_num // groups
    largest, total = (
        (t[..., 0].t().unsqueeze(0) if input_layout == "TND" else t[..., 0])
        for t in (softmax_max, softmax_sum)
    )
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    ends = (actual_seq_qlen, actual_seq_kvlen)
    for rows, columns in _blocks(query, key, head_num, input_layout, ends):
        some, keys, values = q[:, rows], k[:, columns], v[:, columns]
        seen = visible(
            some.shape[1], keys.shape[1], atten_mask, sparse_mode, pre_tockens, next_tockens
        )
        scores = _scores(some, keys, scale_value, seen)
        rows_largest, rows_total = (t[:, :, rows].unsqueeze(-1) for t in (largest, total))
        p = (scores - rows_largest).exp() / rows_total
        do = dout[:, rows].to(wide)
        wide_keys, wide_values = (
            t.to(wide).repeat_interleave(per_group, dim=2) for t in (keys, values)
        )
        dp = torch.einsum("bsnd,bjnd->bnsj", do, wide_values)
        dot = torch.einsum("bsnd,bsnd->bns", do, out[:, rows].to(wide))
        ds = scale_value * p * (dp - dot.unsqueeze(-1))
        dq[:, rows] = torch.einsum("bnsj,bjnd->bsnd", ds, wide_keys)
        whole_dk = torch.einsum("bnsj,bsnd->bjnd", ds, some.to(wide))
        whole_dv = torch.einsum("bnsj,bsnd->bjnd", p, do)
        for target, whole in ((dk, whole_dk), (dv, whole_dv)):
            target[:, columns] = whole.unflatten(2, (groups, per_group)).sum(3)
    joined = (_join(t.to(query.dtype), input_layout) for t in (dq, dk, dv))
    return *joined, query.new_empty(0), query.new_empty(0)
