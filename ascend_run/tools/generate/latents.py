"""Latents in place of keys and values in the cache of a model with multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.latent_attention import CachedLatents
from ascend_run.ops.linear.packed_linear import PackedWeight
from ascend_run.types.forward import Forward, ForwardLink

from .lean import asks_more

if TYPE_CHECKING:
    from ascend_run.core.model.latent_attention import LatentAttention

# T tokens of a step, t those of this rank with sequence parallelism (else T), H hidden size


@attrs.define(eq=False)
class LatentModel:
    """Links of the attention of layers, which take effect with ``prepare``."""

    forward: CachedForward
    layers: dict[nn.Module, CachedLatents] = attrs.field(factory=dict)
    _seen: list[nn.Module] = attrs.field(factory=list)

    def link(self, attention: nn.Module) -> ForwardLink:
        """Return a link that computes steps of multi-latent attention by cached latents."""
        self._seen.append(attention)

        def wrap(inner: Forward) -> Forward:
            def forward(
                hidden: Tensor, *arguments: Any, rotary_pos_emb: Any = None, **options: Any
            ) -> Any:
                latents = self.layers.get(attention)
                asks = arguments or asks_more(options)
                if latents is None or self.forward.step is None or asks:
                    return inner(hidden, *arguments, rotary_pos_emb=rotary_pos_emb, **options)
                of_batch = options.get("packed_seq_params")
                scale = None if of_batch is None else of_batch.query_scale
                return _attended(attention, latents, hidden, rotary_pos_emb, scale)

            return forward

        return ForwardLink(wrap=wrap, compilable=False)

    def prepare(self, weights: Mapping[nn.Module, PackedWeight]) -> None:
        """Cache latents from now on, in each layer where that computes the same.

        Args:
            weights: Of the linears. Plain ones of ``linears`` must be kept.
        """
        from .recognition import cached_latents

        for attention in self._seen:
            if (latents := cached_latents(attention, weights)) is not None:
                self.layers[attention] = latents

    def linears(self) -> Iterator[Any]:
        """Yield the linears whose plain weights are read here."""
        for attention in self.layers:
            yield attention.linear_kv_up_proj


def _attended(
    attention: Any,
    latents: CachedLatents,
    hidden_t1H: Tensor,
    tables: Tensor,
    query_scale_T111: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [t, 1, H] of ``LatentAttention`` for a step, and its bias."""
    module: LatentAttention = attention
    q_T1ND = module.unrotated_queries(hidden_t1H)
    latent_T1L, k_T1R = module.compressed(hidden_t1H)
    latent_TL = module.kv_layernorm(latent_T1L).squeeze(1)
    rotated_TR = module.rotated(k_T1R.unsqueeze(2), tables).flatten(1)
    plain, turning = q_T1ND.tensor_split((latents.key_width,), -1)
    q_TND = torch.cat((plain, module.rotated(turning, tables)), -1).squeeze(1)
    if query_scale_T111 is not None:
        q_TND = q_TND * query_scale_T111.squeeze(1)
    out_TNE = latents(q_TND, latent_TL, rotated_TR)
    result: tuple[Tensor, Tensor | None] = module.linear_proj(out_TNE.flatten(1).unsqueeze(1))
    return result
