"""Fused attention, forward and backward, as documented: both versions, by one formula.

``softmax(mask(scale * (q @ k.T + pse)))`` in the first version and with ``pse_type`` 1,
``softmax(mask(scale * q @ k.T + pse))`` otherwise; dropout on the probabilities.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYOUTS = {"SBH": "sb", "BSH": "bs", "BSND": "bsnd", "BNSD": "bnsd"}


def visible(
    num_queries: int, num_keys: int, mask: Tensor | None, mode: int, before: int, after: int
) -> Tensor:
    """Return which scores are visible, [S, J], by the documented meaning of ``sparse_mode``.

    0 without a mask: all; 1: what the full mask leaves; 2: the lower triangle from the upper left
    corner; 3: the one to the lower right corner; 4: the band between ``before`` and ``after`` keys
    of the diagonal that ends in the lower right corner.
    """
    if mask is None:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    assert mask.dtype == torch.bool
    if mode == 1:
        assert mask.shape == (num_queries, num_keys)
        return ~mask
    assert mask.shape == (2048, 2048)
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
    query: Tensor, key: Tensor, layout: str, ends: tuple[Any, Any]
) -> list[tuple[Any, Any]]:
    """Yield indices of q and k (into [B, S, N, D] or [T, N, D]) that see each other."""
    if layout in LAYOUTS:
        return [(slice(None), slice(None))]
    assert layout == "TND"
    pairs, start = [], (0, 0)
    for end in zip(*ends, strict=True):
        pairs.append((slice(start[0], end[0]), slice(start[1], end[1])))
        start = end
    assert start == (query.shape[0], key.shape[0])
    return pairs


def _split(x: Tensor, heads: int, layout: str) -> Tensor:
    """Reshape to [B, S, N, D]; a packed sequence is a batch of one."""
    if layout == "TND":
        return x.unsqueeze(0)
    if layout == "BNSD":
        return x.transpose(1, 2)
    if layout == "BSND":
        return x
    x = x.unflatten(2, (heads, -1))
    return x.transpose(0, 1) if layout == "SBH" else x


def _join(x_BSND: Tensor, layout: str) -> Tensor:
    if layout == "TND":
        return x_BSND.squeeze(0)
    if layout == "BNSD":
        return x_BSND.transpose(1, 2).contiguous()
    if layout == "BSND":
        return x_BSND
    return (x_BSND.transpose(0, 1) if layout == "SBH" else x_BSND).flatten(2)


def _groups(key: Tensor, width: int, layout: str) -> int:
    if layout in ("SBH", "BSH"):
        return key.shape[2] // width
    return key.shape[{"TND": 1, "BSND": 2, "BNSD": 1}[layout]]


class Scoring(NamedTuple):
    """The arguments that determine the scores, in either version's names."""

    scale: float
    mask: Tensor | None
    mode: int
    before: int
    after: int
    pse: Tensor | None
    pse_type: int
    query_start: int
    key_start: int

    def of(self, q_BSND: Tensor, k_BJND: Tensor, *, packed: bool) -> Tensor:
        """Return scores [B, N, S, J], -inf where masked; float32, or float64 for float64."""
        q, k = q_BSND, k_BJND
        wide = torch.promote_types(q.dtype, torch.float32)
        k = k.to(wide).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        products = torch.einsum("bsnd,bjnd->bnsj", q.to(wide), k)
        seen = visible(q.shape[1], k.shape[1], self.mask, self.mode, self.before, self.after)
        assert bool(seen.any(-1).all()), "a row of the mask hides every key"
        if self.pse is None:
            scores = self.scale * products
        elif self.pse_type == 1:
            scores = self.scale * (products + self._written(products, q.dtype, packed))
        elif self.pse_type == 0:
            scores = self.scale * products + self._written(products, q.dtype, packed)
        else:
            scores = self.scale * products + self._made(products)
        return scores.masked_fill(~seen, -torch.inf)

    def _written(self, like_BNSJ: Tensor, dtype: torch.dtype, packed: bool) -> Tensor:
        assert self.pse is not None
        assert not packed, "a bias of packed documents is not written down here"
        assert self.pse.dtype == dtype
        assert self.pse.is_contiguous()
        batch, heads, queries, keys = like_BNSJ.shape
        rows = self.pse.shape[2]
        if rows == 1024 < queries:
            assert queries == keys
            assert self.mode in (0, 2, 3)
            assert self.pse.shape in ((1, heads, 1024, keys), (batch, heads, 1024, keys))
            return self._unfolded(queries)
        allowed = [(batch, heads, queries, keys), (1, heads, queries, keys)]
        allowed.append((batch, heads, 1, keys))
        assert tuple(self.pse.shape) in allowed, "BNSS, 1NSS or BN1S"
        return self.pse.to(like_BNSJ.dtype)

    def _unfolded(self, queries: int) -> Tensor:
        """Expand the last 1024 rows: each row equals the one below, shifted by one key."""
        assert self.pse is not None
        whole = self.pse.new_zeros(*self.pse.shape[:2], queries, queries)
        whole[:, :, -1024:] = self.pse
        for row in range(queries - 1024):
            down = queries - 1 - row
            down -= down % 1024 if down >= 1024 else 0
            below = whole[:, :, row + down] if row + down >= queries - 1024 else None
            assert below is not None
            whole[:, :, row, : row + 1] = below[..., down : down + row + 1]
        return whole.double() if whole.dtype == torch.float64 else whole.float()

    def _made(self, like_BNSJ: Tensor) -> Tensor:
        """Build the bias from slopes."""
        assert self.pse is not None
        heads, queries, keys = like_BNSJ.shape[1:]
        assert queries == keys, "as many keys as queries"
        assert self.pse.dtype == torch.float32
        assert self.pse.shape == (heads,)
        rows = torch.arange(queries)[:, None] + self.query_start
        away = (rows - torch.arange(keys) - self.key_start).abs().to(like_BNSJ.dtype)
        if self.pse_type == 3:
            away = away.sqrt()
        return -self.pse.to(like_BNSJ.dtype)[:, None, None] * away


def _kept(seed: int, offset: int, keep: float, like_BNSJ: Tensor, part: int) -> Tensor | float:
    """Return the dropout factors, a function of seed and offset."""
    if keep == 1.0:
        return 1.0
    generator = torch.Generator().manual_seed((seed * 31 + offset) * 1031 + part)
    return torch.empty_like(like_BNSJ).bernoulli_(keep, generator=generator) / keep


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    layout: str,
    scoring: Scoring,
    ends: tuple[Any, Any],
    keep: float,
) -> tuple[Any, ...]:
    _check(query, key, value, keep)
    q = _split(query, heads, layout)
    groups = _groups(key, q.shape[3], layout)
    k, v = (_split(t, groups, layout) for t in (key, value))
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    largest = q.new_empty((q.shape[0], heads, q.shape[1]), dtype=wide)
    total = torch.empty_like(largest)
    seed, offset, numels = 0, 0, 0
    if keep < 1.0:  # drawn from the device's generator
        seed, offset = torch.initial_seed() % 2**31, int(torch.randint(2**20, ()))
    for part, (rows, columns) in enumerate(_blocks(query, key, layout, ends)):
        some, keys, values = q[:, rows], k[:, columns], v[:, columns]
        scores = scoring.of(some, keys, packed=layout == "TND")
        part_largest = scores.amax(-1)
        terms = (scores - part_largest.unsqueeze(-1)).exp()
        part_total = terms.sum(-1)
        spread = values.to(wide).repeat_interleave(heads // groups, dim=2)
        probabilities = terms / part_total.unsqueeze(-1)
        if keep < 1.0:
            numels += scores.numel()
            probabilities = probabilities * _kept(seed, offset, keep, scores, part)
        product = torch.einsum("bnsj,bjnd->bsnd", probabilities, spread)
        out[:, rows], largest[:, :, rows], total[:, :, rows] = (
            product.to(q.dtype),
            part_largest,
            part_total,
        )
    softmax = [_repeated(t, layout) for t in (largest, total)]
    return _join(out, layout), *softmax, query.new_empty(0), seed, offset, numels


def _backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    heads: int,
    layout: str,
    scoring: Scoring,
    ends: tuple[Any, Any],
    keep: float,
    given: tuple[Tensor, Tensor, Tensor],
    drawn: tuple[int, int, int],
) -> tuple[Any, ...]:
    """Recompute the softmax from the given statistics."""
    query, key, value, dy = tensors
    attention_in, softmax_max, softmax_sum = given
    assert softmax_max.shape[-1] == softmax_sum.shape[-1] == 8, "repeated"
    _check(query, key, value, keep)
    assert dy.shape == query.shape == attention_in.shape
    q, out, dout = (_split(t, heads, layout) for t in (query, attention_in, dy))
    groups = _groups(key, q.shape[3], layout)
    k, v = (_split(t, groups, layout) for t in (key, value))
    wide = torch.promote_types(q.dtype, torch.float32)
    per_group = heads // groups
    largest, total = (
        (t[..., 0].t().unsqueeze(0) if layout == "TND" else t[..., 0])
        for t in (softmax_max, softmax_sum)
    )
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    seed, offset, numels = drawn
    seen = 0
    for part, (rows, columns) in enumerate(_blocks(query, key, layout, ends)):
        some, keys, values = q[:, rows], k[:, columns], v[:, columns]
        scores = scoring.of(some, keys, packed=layout == "TND")
        seen += scores.numel()
        kept = _kept(seed, offset, keep, scores, part)
        rows_largest, rows_total = (t[:, :, rows].unsqueeze(-1) for t in (largest, total))
        p = (scores - rows_largest).exp() / rows_total
        do = dout[:, rows].to(wide)
        wide_keys, wide_values = (
            t.to(wide).repeat_interleave(per_group, dim=2) for t in (keys, values)
        )
        dp = torch.einsum("bsnd,bjnd->bnsj", do, wide_values) * kept
        dot = torch.einsum("bsnd,bsnd->bns", do, out[:, rows].to(wide))
        ds = scoring.scale * p * (dp - dot.unsqueeze(-1))
        dq[:, rows] = torch.einsum("bnsj,bjnd->bsnd", ds, wide_keys)
        whole_dk = torch.einsum("bnsj,bsnd->bjnd", ds, some.to(wide))
        whole_dv = torch.einsum("bnsj,bsnd->bjnd", p * kept, do)
        for target, whole in ((dk, whole_dk), (dv, whole_dv)):
            target[:, columns] = whole.unflatten(2, (groups, per_group)).sum(3)
    assert keep == 1.0 or numels == seen, "the length that the forward answered"
    return tuple(_join(t.to(query.dtype), layout) for t in (dq, dk, dv))


def _repeated(x_BNS: Tensor, layout: str) -> Tensor:
    """Repeat to [B, N, S, 8], or [T, N, 8]."""
    x = x_BNS.squeeze(0).t() if layout == "TND" else x_BNS
    return x.unsqueeze(-1).expand(*x.shape, 8).contiguous()


def _check(query: Tensor, key: Tensor, value: Tensor, keep: float) -> None:
    assert query.is_contiguous()
    assert key.shape == value.shape, "key and value have one shape"
    assert query.dtype == key.dtype == value.dtype
    assert 0.0 < keep <= 1.0


def _read(options: dict[str, Any], layout: str, version: int) -> tuple[Scoring, tuple[Any, Any]]:
    """Parse one version's arguments; raises if a significant one is unused."""
    tokens = "tockens" if version == 1 else "tokens"
    starts = [options.pop(name, None) for name in ("q_start_idx", "kv_start_idx")]
    scoring = Scoring(
        scale=options.pop("scale", None) or options.pop("scale_value", 1.0),
        mask=options.pop("atten_mask", None),
        mode=options.pop("sparse_mode", 0),
        before=options.pop(f"pre_{tokens}", 2147483647),
        after=options.pop(f"next_{tokens}", 2147483647),
        pse=options.pop("pse", None),
        pse_type=options.pop("pse_type", 1),
        query_start=starts[0][0] if starts[0] else 0,
        key_start=starts[1][0] if starts[1] else 0,
    )
    ends = options.pop("actual_seq_qlen", None), options.pop("actual_seq_kvlen", None)
    assert options.pop("softmax_layout", "") == ("TND" if layout == "TND" else "")
    defaults = {"gen_mask_parallel": True, "sync": False, "inner_precise": 0, "scale_value": 1.0}
    for name, value in options.items():
        assert value == defaults.get(name) or value is None, f"{name} is not written down here"
    return scoring, ends


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *rest: Any,
    **o: Any,
) -> tuple[Any, ...]:
    return _version(1, query, key, value, head_num, input_layout, *rest, **o)


def npu_fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Any, ...]:
    return _version(2, query, key, value, head_num, input_layout, **o)


_FIRST_OPTIONS = (
    "pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens",
    "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode",
    "gen_mask_parallel", "sync", "softmax_layout", "sink", "dropout_mask", "seed", "offset",
)  # fmt: skip
"""Of the first version, whose options may be positional."""


def _version(
    version: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    layout: str,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    options |= dict(zip(_FIRST_OPTIONS, rest, strict=False))
    assert not options.pop("seed", 0), "drawn from the device's generator"
    assert not options.pop("offset", 0)
    keep = options.pop("keep_prob", 1.0)
    scoring, ends = _read(options, layout, version)
    return _forward(query, key, value, heads, layout, scoring, ends, keep)


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    **o: Any,
) -> tuple[Any, ...]:
    gradients = _gradients(1, (query, key, value, dy), head_num, input_layout, o)
    return *gradients, query.new_empty(0), query.new_empty(0)


def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    **o: Any,
) -> tuple[Any, ...]:
    gradients = _gradients(2, (query, key, value, dy), head_num, input_layout, o)
    return *gradients, *(query.new_empty(0) for _ in range(4))


def _gradients(
    version: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    heads: int,
    layout: str,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    drawn = tuple(options.pop(name, 0) for name in ("seed", "offset", "numels"))
    given = tuple(options.pop(name) for name in ("attention_in", "softmax_max", "softmax_sum"))
    keep = options.pop("keep_prob", 1.0)
    scoring, ends = _read(options, layout, version)
    return _backward(tensors, heads, layout, scoring, ends, keep, given, drawn)
