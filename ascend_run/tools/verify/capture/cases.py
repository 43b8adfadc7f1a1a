"""Record the hard cases that occur on one rank: routed tokens, and what batches contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.model.router import Router
from ascend_run.plugin_api import contracts as c

from .case_record import CaseRecord, MicroBatch, Routing
from .taps import whole_name

_MASK: Final = "loss_mask"
_POSITIONS: Final = "position_ids"


def micro_batch_of(batch: c.Batch, step: int) -> MicroBatch | None:
    """Describe a micro-batch; None if its task has no loss mask for each token."""
    mask = batch.tensors.get(_MASK)
    if mask is None or mask.dim() != 2:
        return None
    trained = mask > 0
    positions = batch.tensors.get(_POSITIONS)
    if positions is None or positions.shape != mask.shape:
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = torch.where(trained, positions, -1).amax(dim=1)
    ends = batch.document_ends
    if batch.row_ends is not None:
        num_documents = sum(len(row) for row in batch.row_ends)
    else:
        num_documents = mask.shape[0] if ends is None else len(ends)
    return MicroBatch(
        step=step,
        trained=trained.sum(dim=1).tolist(),
        ends=torch.stack((last, positions.amax(dim=1)), dim=1).tolist(),
        documents=num_documents,
        length=mask.shape[1],
    )


@contextmanager
def routing_recorded(bundle: c.ModelBundle, pp_rank: int, record: CaseRecord) -> Iterator[None]:
    """Record the tokens of every built-in router of this rank inside the block."""
    with ExitStack() as stack:
        for chunk in bundle.chunks:
            model = unwrapped(chunk)
            vp_stage = getattr(model, "vp_stage", None)
            offset = get_transformer_layer_offset(bundle.transformer_config, vp_stage, pp_rank)
            for local_name, module in model.named_modules():
                if isinstance(module, Router):
                    name = whole_name(local_name, model, offset)
                    hook = module.register_forward_hook(partial(_note, record, name))
                    stack.callback(hook.remove)
        yield


@torch.no_grad()
def _note(record: CaseRecord, name: str, router: Any, given: Any, output: Any) -> None:
    if torch._C._current_graph_task_id() != -1:  # recomputed in backward
        return
    routing_map: Tensor = output[1]
    seen = record.routing.setdefault(name, Routing(tokens=[0] * routing_map.shape[1]))
    counts = routing_map.sum(dim=0).tolist()
    seen.tokens = [a + int(b) for a, b in zip(seen.tokens, counts, strict=True)]
    seen.total += routing_map.shape[0]
    logits = router.gating(given[0]).flatten(0, -2)
    scores = logits.sigmoid() if _is_sigmoid(router) else logits
    if router.expert_bias is not None:
        scores = scores + router.expert_bias
    chosen = routing_map.to(torch.bool)
    worst = scores.masked_fill(~chosen, torch.inf).amin(dim=-1)
    if router.groups is not None and not _is_softmax_of_all(router):
        seen.below_zero = (seen.below_zero or 0) + int((worst < 0).sum())
    best = scores.masked_fill(chosen, -torch.inf).amax(dim=-1)
    seen.ties += int((worst == best).sum())


def _is_softmax_of_all(router: Any) -> bool:
    return bool(router.config.moe_router_pre_softmax) and not _is_sigmoid(router)


def _is_sigmoid(router: Any) -> bool:
    return bool(router.config.moe_router_score_function == "sigmoid")
