"""Memory of what stands before the first layer and after the last one."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.plugin_api.contracts import ParameterCost, PipelineStage
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .backward import norm_backward
from .loss import loss_working, saved_by_loss
from .memory import Ends
from .parameters import trained_ends, trains_output
from .saved import embedding_norm_saved, rotary_bytes, stream_bytes
from .sizes import Sizes

_INDEX, _WIDE = 8, 4


def stage_ends(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    rank: PipelineStage,
    parameters: Sequence[ParameterCost],
) -> Ends:
    """Return the memory of the ends of one stage's model, for one micro-batch."""
    hidden, pipelined = stream_bytes(sizes), layout.pp > 1
    is_last, tied = rank.is_last, bool(config.model.share_embeddings_and_output_weights)
    ends_trained = trained_ends(parameters)
    trains = trains_output(config, parameters)
    table = sizes.vocab * sizes.hidden * sizes.item_bytes
    saved_of_loss = sum(saved_by_loss(config, sizes, trains=trains))
    loss = loss_working(config, layout, sizes, trains=trains)
    depths = len(sizes.mtp_layers)
    return Ends(
        hidden=hidden,
        embedding_norm=embedding_norm_saved(config, sizes) if rank.is_first else 0.0,
        final_norm=hidden + sizes.shared_tokens * _WIDE if is_last else 0.0,
        final_norm_backward=norm_backward(config, sizes) if is_last else 0.0,
        # The losses are taken one after the other, and keep their gradients.
        loss=loss + depths * saved_of_loss if is_last else 0.0,
        loss_saved=(1 + depths) * saved_of_loss if is_last else 0.0,
        output_gradient=table if trains and is_last and tied and not pipelined else 0.0,
        embedding_gradient=table if rank.is_first and "embedding" in ends_trained else 0.0,
        batch=sizes.tokens * (3 * _INDEX + _WIDE) + _stacked_tables(config, sizes),
        has_next=not is_last,
        pipelined=pipelined,
    )


def _stacked_tables(config: RunConfig, sizes: Sizes) -> float:
    """Bytes of the tables of both kinds of layers, which every micro-batch stacks and keeps."""
    return rotary_bytes(config, sizes) if config.model.rotary_local_base else 0.0
