"""Padded experts on a device that refuses to be read: from the router to the sums of outputs.

The tensors are meta tensors, which have no values; the ranks are torch's fake ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher
from ascend_run.ops.experts.exchanged_experts import (
    ExpertGroups,
    LocalDispatcher,
    exchanged_experts,
)
from ascend_run.ops.experts.expert_mlp import expert_mlp
from ascend_run.ops.experts.grouped_matmul import Backend
from ascend_run.ops.experts.routing import routing_scores
from ascend_run.ops.experts.token_dropping import TokenDropping
from ascend_run.types.moe import ExpertActivation, ExpertWeights

from .dispatcher_jobs import X, groups_of, megatrons, through

TOKENS, TOPK, H, F = 6, 2, 16, 16


@pytest.fixture
def ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def layer(ep: int, tp: int, backend: Backend | None, *, fused: bool, pads: bool) -> list[Tensor]:
    """Compute a layer, forward and backward; return its leaves and its output.

    Args:
        backend: Of the grouped GEMM; None: the experts exchange their tokens.
    """
    x, router = trained(TOKENS, 1, H), trained(X, H)
    fc1, fc2 = trained(X // ep, 2 * F // tp, H), trained(X // ep, H, F // tp)
    groups = groups_of(ep, tp)
    inner = megatrons(groups, TOPK, factor=1.0, pads=pads)
    make = LocalDispatcher if backend is None else AllToAllDispatcher
    dispatcher = make(inner, overlap=fused, fused=fused)

    def experts(rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        if backend is None:
            own, swiglu = ExpertWeights(fc1, fc2), ExpertActivation(function=silu)
            return exchanged_experts(rows, weights, own, swiglu, ExpertGroups(*groups[:2]))
        on_device = backend == "grouped_mm"
        given = counts.to("meta") if on_device else counts.tolist()
        return expert_mlp(rows, given, weights, fc1, fc2, backend=backend)

    scores = routing_scores(x.flatten(0, 1) @ router.t(), TOPK, "softmax", True)
    probs, chosen = TokenDropping(TOPK, 1.0, "probs", pads=pads)(*scores)
    out = through(dispatcher, x, chosen, probs, experts)
    out.backward(torch.empty_like(out))
    return [x, router, fc1, fc2, out]


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore:.*(all_gather_into|reduce_scatter)_tensor. is:FutureWarning")
@pytest.mark.parametrize("backend", ["loop", "bmm", "grouped_mm", None])
@pytest.mark.parametrize("fused", [False, True], ids=["indexed", "fused"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_router_dispatcher_and_experts_read_nothing(
    ep: int, tp: int, fused: bool, backend: Backend | None
) -> None:
    *leaves, out = layer(ep, tp, backend, fused=fused, pads=True)
    assert out.device.type == "meta"
    assert out.shape == leaves[0].shape
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor. is deprecated:FutureWarning")
@pytest.mark.parametrize("ep", [1, 2])
def test_the_device_refuses_the_counts_of_experts_without_padding(ep: int) -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        layer(ep, 1, "loop", fused=False, pads=False)
