"""Memory of what stands before the first layer and after the last one."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.core.config.vocabulary import has_tied_output
from ascend_run.plugin_api.contracts import ParameterCost, PipelineStage
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .backward import norm_backward
from .loss import loss_backward, loss_working, saved_by_loss
from .memory import Ends
from .parameters import trained_ends, trains_output
from .saved import embedding_norm_saved, rotary_bytes, stream_bytes
from .sizes import Sizes
from .state import keeps_own_gradients

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
    is_last, tied = rank.is_last, has_tied_output(config.model)
    ends_trained = trained_ends(parameters)
    trains = trains_output(config, parameters)
    table = sizes.vocab * sizes.hidden * sizes.item_bytes
    saved_of_loss = sum(saved_by_loss(config, sizes, trains=trains))
    loss = loss_working(config, layout, sizes, trains=trains)
    depths = len(sizes.mtp_layers)
    final_norm = hidden + sizes.shared_tokens * _WIDE if is_last else 0.0
    sums_up = trains and is_last and tied and not pipelined
    passes = sizes.num_microbatches
    # Else it is counted among the gradients, since it becomes the parameter's.
    waits = passes > 1 or not keeps_own_gradients(config, layout, passes)
    output = (config.model.num_labels or sizes.vocab) * sizes.hidden * sizes.item_bytes
    weight_waits = output if trains and not sums_up and waits else 0.0
    looks_up = "embedding" in ends_trained
    looks_ahead = looks_up and is_last and depths > 0
    return Ends(
        hidden=hidden,
        embedding_norm=embedding_norm_saved(config, sizes) if rank.is_first else 0.0,
        final_norm=final_norm,
        final_norm_backward=norm_backward(config, sizes) if is_last else 0.0,
        # The losses are taken one after the other, and keep their gradients.
        loss=loss + depths * saved_of_loss if is_last else 0.0,
        loss_saved=(1 + depths) * saved_of_loss if is_last else 0.0,
        loss_backward=loss_backward(config, sizes, trains=trains) if is_last else 0.0,
        earlier_losses={
            layer: depth * saved_of_loss + final_norm + weight_waits
            for depth, layer in enumerate(sizes.mtp_layers if is_last else (), start=1)
        },
        output_gradient=table if sums_up else 0.0,
        embedding_gradient=table if rank.is_first and looks_up else 0.0,
        lookup_gradient=table if looks_ahead else 0.0,
        lookups_wait=rank.is_first and not sums_up,
        batch=sizes.tokens * (3 * _INDEX + _WIDE) + _stacked_tables(config, sizes),
        has_next=not is_last,
        exchanged=hidden * _exchanged(config, layout),
    )


def _exchanged(config: RunConfig, layout: Layout) -> int:
    """Hidden states that are received or sent during a backward; where that is overlapped, the next
    forward's input and the next backward's gradient, too."""
    if layout.pp == 1:
        return 0
    return 4 if layout.vpp is not None and config.parallel.overlap_p2p_comm else 2


def _stacked_tables(config: RunConfig, sizes: Sizes) -> float:
    """Bytes of the tables of both kinds of layers, which every micro-batch stacks and keeps."""
    return rotary_bytes(config, sizes) if config.model.rotary_local_base else 0.0
