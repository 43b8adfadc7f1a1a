"""Experts: expert parallelism, the router's balancing loss, grouped products."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, OPTIMIZER, Bug

_EXPERTS = r"decoder\.layers\.\d+\.mlp\.experts.*|decoder\.layers\.\d+\.mlp"
_MOE = r"decoder\.layers\.\d+\.mlp.*"
_ROUTER = r"decoder\.layers\.\d+\.mlp\.router.*"
_SWIGLU = "ascend_run.ops.experts.expert_mlp:SwiGlu"

BUGS: Final = (
    Bug(
        name="experts-alike",
        what="every rank draws the experts of the first",
        target="ascend_run.core.model.initialization:_fill_experts",
        old="groups.ep.rank() * parameter.shape[0]",
        new="0 * parameter.shape[0]",
        layout={"dp": 2, "ep": 2},
        model="moe",
        modules=_MOE,
        phases=(FORWARD,),
    ),
    Bug(
        name="experts-as-dense",
        what="the gradients of spread experts are reduced as if every rank held all of them",
        target="ascend_run.core.model.experts:Experts.__init__",
        old="mark(parameter, allreduce=as_dense)",
        new="mark(parameter, allreduce=True)",
        layout={"dp": 2, "ep": 2},
        model="moe",
        modules=_EXPERTS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="balance-by-own-tokens",
        what="the balancing loss takes the share of tokens of one rank of sequence parallelism",
        target="ascend_run.ops.experts.balancing:balancing_loss",
        old="dist.all_reduce(tokens_BX, group=group)",
        new="tokens_BX *= group.size()",
        layout={"tp": 2, "sp": 1},
        model="moe",
        config={"model.moe_aux_loss_coeff": 1.0},
        modules=_ROUTER,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="balance-by-cp",
        what="the balancing loss grows with the context-parallel size",
        target="ascend_run.ops.experts.balancing:balancing_loss",
        old="fraction_BX = tokens_BX / tokens_BX.sum(dim=-1, keepdim=True)",
        new="fraction_BX = tokens_BX / chosen_SBX.sum()",
        plugins=("ulysses",),
        layout={"cp": 2},
        model="moe",
        modules=_ROUTER,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="expert-norm-of-few",
        what="the experts' part of the gradient norm is not summed over the ranks that hold them",
        target="ascend_run.core.train.optimizer_kinds:expert_kind",
        old="groups.tp_ep_pp, groups.expt_tp",
        new="groups.expt_tp, groups.expt_tp",
        layout={"dp": 2, "ep": 2},
        model="moe",
        config={"optimizer.clip_grad": 0.1},
        modules=r"optimizer|gradient norm",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="gmm-gate-and-up-swapped",
        what="the grouped feed-forward takes the up rows for the gate",
        target=f"{_SWIGLU}.forward",
        old="gate, up = hidden.chunk(2, dim=-1)",
        new="up, gate = hidden.chunk(2, dim=-1)",
        plugins=("gmm",),
        model="moe",
        modules=_MOE,
        phases=(FORWARD,),
    ),
    Bug(
        name="gmm-router-gradient",
        what="the gradient of the router's weights is taken after they were multiplied in",
        target=f"{_SWIGLU}.backward",
        old="torch.sum(dact * product, dim=-1",
        new="torch.sum(dact * product * probs, dim=-1",
        plugins=("gmm",),
        model="moe",
        modules=_MOE,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="gmm-counts-sorted",
        what="the groups of a grouped product have the counts of other experts",
        target="ascend_run.ops.experts.grouped_matmul:LoopGroups.__init__",
        old="on_host(counts)",
        new="sorted(on_host(counts))",
        plugins=("gmm",),
        model="moe",
        modules=_MOE,
        phases=(FORWARD,),
    ),
    Bug(
        name="gmm-silu-of-product",
        what="the gate's gradient goes through the non-linearity at the wrong value",
        target=f"{_SWIGLU}.backward",
        old="silu_backward.grad_input(dproduct.mul_(up), gate,",
        new="silu_backward.grad_input(dproduct.mul_(up), kept,",
        plugins=("gmm",),
        model="moe",
        modules=_MOE,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)
