"""More bugs whose author has not read ``verify``.

Each is of a kind that users of Megatron, MindSpeed, torchtitan, transformers, PEFT or DeepSpeed
have reported. Many are the same on every layout, need a rare input, or show only in a resumed run.

In five records, here and in ``blind_second_states``, the words of ``verify`` were added to the
author's: for resumed runs ``data order`` to ``batch``, ``optimizer state`` to ``optimizer``, and
``weights`` to the module of a weight; and ``model`` where the patched method is the whole model's.
Of ``blind2-masked-groups-score-zero`` the author said that the first loss is right; it is no
longer, as the probes' bias now begins below 0.
"""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, OPTIMIZER, Bug

ATTENTION: Final = r"decoder\.layers\.\d+\.self_attention(\.(core_attention|linear_qkv))?"
_EXPERTS: Final = r"decoder\.layers\.\d+\.mlp(\.experts)?"
ROUTER: Final = r"decoder\.layers\.\d+\.mlp(\.router)?"
_NORMS: Final = (
    r"decoder\.layers\.\d+\.(input_layernorm|pre_mlp_layernorm)|decoder\.final_layernorm"
)
LINEARS: Final = r"decoder\.layers\.\d+\.\w+\.linear_\w+(\.adapter)?"

LATENT: Final = {
    "model.multi_latent_attention": True,
    "model.num_query_groups": 8,
    "model.q_lora_rank": 16,
    "model.kv_lora_rank": 16,
    "model.qk_head_dim": 8,
    "model.qk_pos_emb_head_dim": 4,
    "model.v_head_dim": 8,
    "model.qk_layernorm": True,
}
BIASED_ROUTER: Final = {
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
}

# The same on every layout: a run on one rank has them too.
_EVERYWHERE: Final = (
    Bug(
        name="blind2-softcap-gradient-without-square",
        what="the gradient of the attention softcap is 1 - tanh, not 1 - tanh squared",
        target="ascend_run.ops.attention.blockwise_attention:backward",
        old="(1.0 - (capped / spec.softcap).square())",
        new="(1.0 - capped / spec.softcap)",
        config={"model.attn_logit_softcapping": 2.0},
        modules=ATTENTION,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-rms-norm-gradient-forgets-weight",
        what="RMSNorm's backward takes the mean of dy * x without the weight: right while it is 1",
        target="ascend_run.ops.elementwise.rms_norm:_RmsNorm.backward",
        old="torch.mv(products_TH, weight_H.to(wide))",
        new="products_TH.sum(1)",
        modules=_NORMS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-key-norm-takes-query-weights",
        what="keys are normalized with the weights of the queries' norm, equal at first",
        target="ascend_run.core.model.attention:SelfAttention._heads",
        old="k = self.k_layernorm(k)",
        new="k = self.q_layernorm(k)",
        config={"model.qk_layernorm": True},
        modules=r"decoder\.layers\.\d+\.self_attention(\.[qk]_layernorm)?",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-shared-gate-by-softmax",
        what="the gate of the shared expert is a softmax over one logit, so always 1 (qwen2_moe)",
        target="megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
        old="torch.nn.functional.sigmoid(logits)",
        new="torch.nn.functional.softmax(logits, dim=-1)",
        model="moe",
        config={
            "model.moe_shared_expert_intermediate_size": 32,
            "model.moe_shared_expert_gate": True,
        },
        modules=r"decoder\.layers\.\d+\.mlp(\.shared_experts)?",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-aux-loss-shrinks-with-micro-batches",
        what="the auxiliary loss, a sum over tokens, is divided by the number of micro-batches too",
        target="megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        old="MoEAuxLossAutoScaler.set_loss_scale(loss_scale)",
        new="MoEAuxLossAutoScaler.set_loss_scale(loss_scale / num_microbatches)",
        model="moe",
        config={
            "model.moe_router_load_balancing_type": "aux_loss",
            "model.moe_aux_loss_coeff": 0.05,
            "train.micro_batch_size": 1,
            "train.global_batch_size": 4,
        },
        modules=rf"{ROUTER}|schedule|loss",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-latent-scale-takes-magnitude-once",
        what="with yarn the softmax scale of latent attention has the magnitude, not its square",
        target="ascend_run.core.config.latent_attention:latent_softmax_scale",
        old="magnitude**2",
        new="magnitude",
        config={
            **LATENT,
            "model.rope_type": "yarn",
            "model.rotary_scaling_factor": 40.0,
            "model.mscale": 1.0,
            "model.mscale_all_dim": 1.0,
        },
        modules=r"decoder\.layers\.\d+\.self_attention(\.core_attention)?",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-adam-betas-swapped",
        what="Adam gets its two decay rates in the wrong order: the first update is the same",
        target="ascend_run.core.config.optimizer:_adamw",
        old="betas=(options.adam_beta1, options.adam_beta2)",
        new="betas=(options.adam_beta2, options.adam_beta1)",
        modules="optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
)

# Right for usual inputs.
_RARE: Final = (
    Bug(
        name="blind2-empty-experts-shift-the-others",
        what="experts without tokens are taken last: the tokens after them get earlier experts",
        target="ascend_run.ops.experts.loop_experts:loop_experts",
        old="outputs = []",
        new="outputs = []; tokens_per_expert = sorted(tokens_per_expert, key=lambda n: n == 0)",
        model="moe",
        config={"model.num_moe_experts": 128},
        modules=_EXPERTS,
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-masked-groups-score-zero",
        what="experts of groups that are not selected score 0, above experts with a negative bias",
        target="ascend_run.ops.experts.routing:_within_groups",
        old="-torch.inf",
        new="0.0",
        model="moe",
        config={
            **BIASED_ROUTER,
            "model.moe_router_bias_update_rate": 0.6,
            "model.num_moe_experts": 8,
            "model.moe_router_topk": 3,
            "model.moe_router_num_groups": 2,
            "model.moe_router_group_topk": 1,
        },
        modules=ROUTER,
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-padding-rows-take-probability",
        what="the rows that pad the vocabulary are in the softmax, each with a logit of 0",
        target="ascend_run.core.model.gpt:GPT._output_weight",
        old="weight if self.valid_rows == weight.shape[0] else weight[: self.valid_rows]",
        new="weight",
        config={"model.make_vocab_size_divisible_by": 96},
        modules="output_layer|loss",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-masked-rows-have-a-sum-of-one",
        what="queries that see none of a block's keys report a log-sum-exp of 0, not of -inf",
        target="ascend_run.ops.attention.pieced_attention:forward",
        old="lse.fill_(-torch.inf)",
        new="lse.zero_()",
        plugins=("ring-attention",),
        layout={"cp": 2},
        config={"model.window_size": [2, 0]},
        modules=ATTENTION,
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-schedule-advances-on-skipped-steps",
        what="the learning rate moves on though fp16 overflowed and no weight was updated",
        target="ascend_run.core.train.step:TrainStep.__call__",
        old="if updated and scheduler is not None:",
        new="if scheduler is not None:",
        config={
            "train.precision": "fp16",
            "optimizer.initial_loss_scale": 2.0**15,
            "optimizer.hysteresis": 1,
            "optimizer.lr_warmup_iters": 2,
        },
        modules="schedule|optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-later-tokens-cross-documents",
        what="multi-token prediction takes its labels from the next document at a document's end",
        target="ascend_run.core.model.gpt:GPT._mtp_gradient",
        old="later_tokens(fields, depths, document_ends, self.partition, self.cp_group)",
        new="later_tokens(fields, depths, None, self.partition, self.cp_group)",
        plugins=("eod-reset",),
        config={"model.mtp_num_layers": 1, "plugins.eod-reset.document_length": 11},
        modules=r"model|mtp(\.\w+)*|embedding(\.word_embeddings)?|output_layer|loss",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)

# Plugins that change the model by design, and families: no run without them is equal.
_BY_DESIGN: Final = (
    Bug(
        name="blind2-short-last-document-joins-the-one-before",
        what="a last document shorter than the others is not separated from the one before it",
        target="ascend_run.plugins.sequence.eod_reset.documents:every",
        old="range(length, whole, length)",
        new="range(length, whole - whole % length, length)",
        plugins=("eod-reset",),
        config={"plugins.eod-reset.document_length": 11},
        modules=rf"batch|{ATTENTION}",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-lora-scale-counts-fused-parts",
        what="the adapters of a fused linear share alpha / r: a third each for q, k and v",
        target="ascend_run.plugins.fine_tuning.lora.adapter:Adapter.__init__",
        old="scale_of_part(part, options)",
        new="scale_of_part(part, options) / len(parts)",
        plugins=("lora",),
        config={"plugins.lora.rank": 4},
        modules=LINEARS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-lora-leaves-norms-trained",
        what="the base model is frozen but for its vectors: norms are trained, and not saved",
        target="ascend_run.plugins.fine_tuning.lora.freezing:freeze",
        old="is_added or is_saved(name, modules)",
        new="is_added or is_saved(name, modules) or parameter.ndim < 2",
        plugins=("lora",),
        config={"plugins.lora.rank": 4},
        modules=rf"{_NORMS}|gradient norm|optimizer",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-alibi-slopes-of-extra-heads",
        what="heads beyond a power of two get slopes that other heads have, not those between",
        target="ascend_run.ops.attention.alibi:slopes",
        old="_series(2 * power, max_bias)[::2]",
        new="_series(2 * power, max_bias)[1::2]",
        plugins=("alibi",),
        config={
            "model.position_embedding_type": "none",
            "model.num_attention_heads": 6,
            "model.kv_channels": 8,
        },
        modules=r"decoder\.layers\.\d+\.self_attention(\.core_attention)?",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-gemma3-layers-swap-rotary-bases",
        what="layers with a window take the global rotary base, and the others the local one",
        target="ascend_run.core.model.attention:SelfAttention.forward",
        old="rotary_pos_emb[int(self.has_window)]",
        new="rotary_pos_emb[int(not self.has_window)]",
        config={
            "model.family": "gemma3_text",
            "model.kv_channels": 8,
            "model.window_size": [8, 0],
            "model.window_attn_skip_freq": 2,
        },
        modules=ATTENTION,
        phases=(FORWARD,),
    ),
)

BUGS: Final = (*_EVERYWHERE, *_RARE, *_BY_DESIGN)
