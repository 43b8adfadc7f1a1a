"""Pipeline parallelism, tied embeddings and data parallelism."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, OPTIMIZER, Bug

_GRADS = "megatron.core.distributed.finalize_model_grads"
_STEP = "ascend_run.core.train.step:ForwardBackward"
_EVERYTHING = r"whole model|loss|output_layer|decoder\.final_layernorm"
_TIED = {"model.share_embeddings_and_output_weights": True}

BUGS: Final = (
    Bug(
        name="last-micro-batch-dropped",
        what="a pipeline leaves the last micro-batch of a step out",
        target=f"{_STEP}.__call__",
        old="num_microbatches=num_microbatches,",
        new="num_microbatches=num_microbatches - (self.p2p is not None),",
        layout={"pp": 2},
        modules=rf"schedule|{_EVERYTHING}|embedding.*",
        phases=(FORWARD,),
    ),
    Bug(
        name="weights-untied",
        what="the copies of a tied embedding keep the gradient of their own stage",
        target=f"{_GRADS}:_allreduce_word_embedding_grads",
        old="_allreduce_embedding_grad(",
        new="(lambda *_, **__: None)(",
        layout={"pp": 2},
        config=_TIED,
        modules=r"embedding.*|output_layer",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="copy-drawn-apart",
        what="the last stage's copy of a tied embedding is drawn by a name of its own",
        target="ascend_run.core.model.initialization:initialize_weights",
        old='if tied and name == "output_layer.weight":',
        new="if False:",
        layout={"pp": 2},
        config=_TIED,
        modules=rf"embedding.*|{_EVERYTHING}",
        phases=(FORWARD,),
    ),
    Bug(
        name="layers-numbered-by-stage",
        what="a stage's layers are drawn as if they were the first of the model",
        target="ascend_run.core.model.initialization:global_name",
        old='cast("TransformerLayer", layer).layer_number - 1',
        new="int(match[1])",
        layout={"pp": 2},
        modules=r"decoder\.layers\.1.*",
        phases=(FORWARD,),
    ),
    Bug(
        name="loss-of-own-batch",
        what="the loss that is reported is that of a rank's own micro-batches",
        target=f"{_STEP}._total",
        old="dist.all_reduce(total, group=self.groups.dp_cp)",
        new="pass",
        layout={"dp": 2},
        modules=_EVERYTHING,
        phases=(FORWARD,),
    ),
    Bug(
        name="tokens-of-own-batch",
        what="gradients are divided by a rank's own number of tokens",
        target=f"{_GRADS}:finalize_model_grads",
        old="torch.distributed.all_reduce(num_tokens, group=dp_cp_group)",
        new="pass",
        layout={"dp": 2},
        modules=rf"gradient reduction|{_EVERYTHING}|embedding.*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="same-samples",
        what="all data-parallel ranks read the samples of the first",
        target="ascend_run.core.data.batches:BatchPlan.samples",
        old="first += self.dp_rank * self.micro_batch_size",
        new="first += 0",
        layout={"dp": 2},
        modules=r"batch",
        phases=(FORWARD,),
    ),
    Bug(
        name="norm-of-own-share",
        what="a distributed optimizer clips by the norm of a rank's own share",
        target="ascend_run.core.train.optimizer_kinds:sharded",
        old="_set_groups(optimizer, groups.intra_dist_opt, kind.tp_group)",
        new="_set_groups(optimizer, kind.norm_group, kind.tp_group)",
        layout={"dp": 2},
        config={"ddp.use_distributed_optimizer": True, "optimizer.clip_grad": 0.1},
        modules=r"optimizer|gradient norm",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
)
