"""Tensor and sequence parallelism."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, Bug

_LABELS = "ascend_run.ops.linear.linear_cross_entropy:_Labels"
_GRADS = "megatron.core.distributed.finalize_model_grads"
_OUTPUT = r"output_layer|loss|whole model|decoder\.final_layernorm|embedding.*"
_NORMS = r".*layernorm.*"

BUGS: Final = (
    Bug(
        name="norm-not-reduced",
        what="the norms' gradients are not summed over the ranks of sequence parallelism",
        target="ascend_run.core.model.norm:Norm.__init__",
        old="mark(parameter, sequence_parallel=config.sequence_parallel)",
        new="mark(parameter, sequence_parallel=False)",
        layout={"tp": 2, "sp": 1},
        modules=_NORMS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="norm-averaged",
        what="the norms' gradients are averaged over the ranks of sequence parallelism",
        target=f"{_GRADS}:_allreduce_non_tensor_model_parallel_grads",
        old="[torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG]",
        new="[torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.AVG]",
        layout={"tp": 2, "sp": 1},
        modules=_NORMS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="hidden-not-copied",
        what="without sequence parallelism, the gradient before the output layer is a rank's own",
        target="ascend_run.core.model.gpt:GPT._gathered_hidden",
        old="out: Tensor = copy_to_tensor_model_parallel_region(hidden, group=group)",
        new="out = hidden",
        layout={"tp": 2},
        modules=_OUTPUT,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="target-not-summed",
        what="a label's logit counts on the rank alone that holds its row",
        target=f"{_LABELS}._over_ranks",
        old="dist.all_reduce(target, group=self.group)",
        new="pass",
        layout={"tp": 2, "sp": 1},
        modules=_OUTPUT,
        phases=(FORWARD,),
    ),
    Bug(
        name="largest-of-own",
        what="the softmax is shifted by the largest logit of a rank's own rows",
        target=f"{_LABELS}._over_ranks",
        old="dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)",
        new="pass",
        layout={"tp": 2, "sp": 1},
        modules=_OUTPUT,
        phases=(FORWARD,),
    ),
    Bug(
        name="vocabulary-off-by-one-rank",
        what="labels are counted from the first row of the rank before",
        target="ascend_run.ops.linear.vocabulary_shard:ShardLabels.__init__",
        old="rows_of_ranks[: tp_group.rank()]",
        new="rows_of_ranks[: max(0, tp_group.rank() - 1)]",
        layout={"tp": 2, "sp": 1},
        modules=_OUTPUT,
        phases=(FORWARD,),
    ),
    Bug(
        name="gate-and-up-cut-as-one",
        what="gate and up rows are cut over the ranks as one block, which swaps parts of them",
        target="ascend_run.core.model.initialization:_fill_sharded",
        old="stride = 2  #",
        new="stride = 1  #",
        layout={"tp": 2, "sp": 1},
        modules=r"decoder\.layers\.0\.mlp.*",
        phases=(FORWARD,),
    ),
    Bug(
        name="router-not-reduced",
        what="the router's gradient is not summed over the ranks of sequence parallelism",
        target="ascend_run.core.model.router:Router.__init__",
        old="self.aux_losses: Tensor | None = None",
        new="self.aux_losses, self.weight.sequence_parallel = None, False",
        layout={"tp": 2, "sp": 1},
        model="moe",
        modules=r".*router.*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)
