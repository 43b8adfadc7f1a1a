"""Bugs in cases that a run of random numbers may not have: tensors large enough to be swapped, an
expert without tokens, scores that tie, more than two ranks."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, Bug

_BY_RANK: Final = (
    "1e-12 * (1 - 2 * torch.distributed.get_rank()) * torch.arange(ranked_TX.shape[-1])"
)

BUGS: Final = (
    Bug(
        name="swap-loses-the-end",
        what="the last bytes of a tensor that was swapped do not come back",
        target="ascend_run.ops.swapping.swapper:Swapper.bring_back",
        old="self.copier.to_device(host, out)",
        new="self.copier.to_device(host, out)\n    out[-8:] = 0",
        plugins=("swap-attention",),
        modules=r"decoder\.layers\.\d+\.self_attention.*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="gmm-stale-gradient",
        what="an expert without tokens gets the gradient of the expert before it",
        target="ascend_run.ops.experts.grouped_matmul:LoopGroups.outer",
        old="    for a, b, product in parts:\n        self.mm(a.t(), b, out=product)",
        new=(
            "    last = products.new_zeros(1)\n"
            "    for a, b, product in parts:\n"
            "        last = self.mm(a.t(), b, out=product) if len(a) else product.copy_(last)"
        ),
        plugins=("gmm",),
        model="moe",
        modules=r"decoder\.layers\.\d+\.mlp.*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ties-by-rank",
        what="of experts with equal scores, each rank selects another one",
        target="ascend_run.ops.experts.routing:routing_scores",
        old="largest(ranked_TX,",
        new=f"largest(ranked_TX + {_BY_RANK},",
        layout={"dp": 2},
        model="moe",
        modules=r"decoder\.layers\.\d+\.mlp.*",
        phases=(FORWARD,),
    ),
    Bug(
        name="ulysses-last-ranks-swapped",
        what="the heads of ranks 2 and 3 come back in each other's place",
        target="ascend_run.ops.transfer.all_to_all:_collected",
        old="size, heads = len(ranges), ranges[-1][1]",
        new=(
            "size, heads = len(ranges), ranges[-1][1]\n"
            "    by_source = by_source[[0, 1, 3, 2]] if size == 4 else by_source"
        ),
        plugins=("ulysses",),
        layout={"cp": 4},
        modules=r"decoder\.layers\.0\.(self_attention|input_layernorm).*",
        phases=(FORWARD,),
    ),
)
