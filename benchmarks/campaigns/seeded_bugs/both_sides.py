"""Mistakes that every run makes alike: a comparison of runs with one another cannot see them."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, OPTIMIZER, Bug

_LINEARS = r"decoder\.layers\.\d+\..*linear_(qkv|proj|fc1|fc2).*"

BUGS: Final = (
    Bug(
        name="scale-of-hidden-width",
        what="the attention's scale is that of hidden size / heads, not of the head's own width",
        target="ascend_run.core.model.attention:CoreAttention.__init__",
        old="math.sqrt(config.kv_channels)",
        new="math.sqrt(config.hidden_size // config.num_attention_heads)",
        modules=r"decoder\.layers\.0\.self_attention\.core_attention",
        phases=(FORWARD,),
    ),
    Bug(
        name="lora-without-alpha",
        what="what an adapter adds is not multiplied by alpha / r",
        target="ascend_run.plugins.fine_tuning.lora.adapter:Adapter.__init__",
        old="scale_of_part(part, options)",
        new="1.0",
        plugins=("lora",),
        modules=_LINEARS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="vectors-decay",
        what="norms and biases have weight decay",
        target="ascend_run.core.train.optimizer:parameter_groups",
        old='parameter.ndim > 1 and not name.endswith("_bias")',
        new="True",
        modules=r"optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="mean-of-each-micro-batch",
        what="the loss is the mean of the micro-batches' means, whatever their numbers of tokens",
        target="ascend_run.core.train.step:ForwardBackward._forward_step",
        old="return loss.sum, lambda total: (total, loss.count.to(torch.int), report)",
        new=(
            "return loss.sum / loss.count, "
            "lambda total: (total, torch.ones_like(loss.count, dtype=torch.int), report)"
        ),
        modules=r"output_layer|loss",  # the loss reads the layer's weight without calling it
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="router-off-the-loss",
        what="the experts' weights are detached; the balancing loss alone trains the router",
        target="ascend_run.core.model.router:Router.routing",
        old="return self._with_aux_loss(probs_TX, ",
        new="return self._with_aux_loss(probs_TX.detach(), ",
        model="moe",
        modules=r"decoder\.layers\.\d+\.mlp\.router",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="backward-without-the-cap",
        what="the backward of the scores' soft cap is that of no cap",
        target="ascend_run.ops.attention.blockwise_attention:backward",
        old="dscores = dscores * (1.0 - (capped / spec.softcap).square())",
        new="pass",
        config={"model.attn_logit_softcapping": 2.0},
        modules=r"decoder\.layers\.1\.self_attention\.core_attention",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)
