"""Context parallelism: ulysses and ring-attention."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, Bug

_RING = "ascend_run.ops.attention.context_parallel.ring"
_SUMS = "ascend_run.ops.attention.context_parallel.sums"
_EXCHANGE = "ascend_run.ops.attention.context_parallel.head_all_to_all"
_ALL_TO_ALL = "ascend_run.ops.transfer.all_to_all"
_ATTENTION = r"decoder\.layers\.0\.(self_attention|input_layernorm).*"
_LAYERS = r"decoder\.layers\.\d+\.(self_attention|input_layernorm).*"
_EMBEDDED = r"embedding.*|decoder\.layers\.0(\.(self_attention|input_layernorm).*)?"
_SEQUENCE = r"embedding.*|decoder\.layers\.0.*|output_layer|loss|whole model"

BUGS: Final = (
    Bug(
        name="loss-by-cp",
        what="the loss is divided by the context-parallel size once more",
        target="ascend_run.core.train.step:ForwardBackward._forward_step",
        old="return loss.sum, lambda",
        new="return loss.sum / self.groups.cp.size(), lambda",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules=r"output_layer|loss|whole model|decoder\.final_layernorm",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ulysses-repeats-mean",
        what="the gradients of repeated key-value heads are averaged, not summed",
        target=f"{_ALL_TO_ALL}:_collected",
        old=".sum(1)",
        new=".mean(1)",
        plugins=("ulysses",),
        layout={"cp": 4},
        modules=_LAYERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ulysses-rank-off-by-one",
        what="a rank holds the part of the sequence of the next one",
        target="ascend_run.ops.attention.context_parallel.partitions:Contiguous.chunks",
        old="((rank * part, (rank + 1) * part),)",
        new="(((rank + 1) % size * part, ((rank + 1) % size + 1) * part),)",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules=_ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="ulysses-heads-interleaved",
        what="the heads that come back are laid out rank by rank inside of heads",
        target=f"{_ALL_TO_ALL}:_collected",
        old="by_source.movedim(0, -3)",
        new="by_source.movedim(0, -2)",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules=_ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="positions-begin-again",
        what="rotary positions begin at 0 on every context-parallel rank",
        target="ascend_run.core.model.rotary:RotaryTable.positions",
        old="torch.arange(start, stop) for",
        new="torch.arange(stop - start) for",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules=rf"rotary|{_ATTENTION}",
        phases=(FORWARD,),
    ),
    Bug(
        name="ulysses-gradient-by-cp",
        what="the gradient of the queries is divided by the ranks of the exchange",
        target=f"{_EXCHANGE}:HeadAllToAll.backward",
        old="return_gradients(dq, dk",
        new="return_gradients(dq / self.group.size(), dk",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules=_LAYERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ring-lse-dropped",
        what="parts of the softmax are averaged, without the correction by log-sum-exp",
        target="ascend_run.ops.attention.log_sum_exp:merge_into",
        old="torch.sigmoid(more_lse - lse).nan_to_num_(0.0)",
        new="torch.full_like(lse, 0.5)",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="ring-lse-of-larger",
        what="the merged log-sum-exp is the larger of the two",
        target="ascend_run.ops.attention.log_sum_exp:merge_into",
        old="torch.logaddexp(lse, more_lse)",
        new="torch.maximum(lse, more_lse)",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_LAYERS,
        phases=(FORWARD,),
    ),
    Bug(
        name="ring-stale-block",
        what="the block that came is not taken: every step sees the rank's own keys",
        target=f"{_RING}:RingRoute._circulated",
        old="held = incoming.wait() if incoming else held",
        new="incoming and incoming.wait()",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="ring-gradients-forwards",
        what="the gradients of keys and values go round the wrong way",
        target=f"{_RING}:RingRoute._backward",
        old="pass_on(total, self.group, by=-1, tag=_GRADIENTS)",
        new="pass_on(total, self.group, by=1, tag=_GRADIENTS)",
        plugins=("ring-attention",),
        layout={"cp": 4},
        modules=_LAYERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ring-keys-of-next",
        what="a step is masked as if the keys of the rank ahead had come",
        # Not in holder itself, whose answers ring_steps keeps.
        target="ascend_run.ops.attention.context_parallel.blocks:ring_steps",
        old="holder(of_rank, step, size, window)",
        new="holder(of_rank, -step, size, window)",
        plugins=("ring-attention",),
        layout={"cp": 4},
        modules=_ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="ring-rows-overwritten",
        what="a later block's gradient of the queries replaces an earlier one's",
        target=f"{_SUMS}:RowSums.add",
        old=".add_(dq)",
        new=".copy_(dq)",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_LAYERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="ring-first-sum-lost",
        what="the gradient of the keys forgets what the ranks before have added",
        target=f"{_SUMS}:KeySums.onto",
        old="if total is None:",
        new="if True:",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_LAYERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)
