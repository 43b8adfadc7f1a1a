"""Bugs whose author has not read ``verify``."""

from __future__ import annotations

from typing import Final

from .bug import Bug

_FINALIZE: Final = "megatron.core.distributed.finalize_model_grads"
_BUCKETS: Final = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_SPREAD: Final = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_DISPATCHERS: Final = "megatron.core.transformer.moe.token_dispatcher"
_RING: Final = "ascend_run.plugins.ring_attention"
_ATTENTION: Final = r"decoder\.layers\.\d+\.self_attention(\.(core_attention|linear_qkv))?"
_EXPERTS: Final = r"decoder\.layers\.\d+\.mlp(\.experts)?"
_ROUTER: Final = r"decoder\.layers\.\d+\.mlp\.router"
_SECOND_CHUNK: Final = r"decoder\.layers\.[23](\..*)?|decoder\.final_layernorm|output_layer"

BUGS: Final = (
    Bug(
        name="blind-overlap-unties-embeddings",
        what="with overlapped reduction tied embeddings are not summed over pipeline stages",
        target=f"{_FINALIZE}:_allreduce_embedding_grad",
        old="get_pg_size(embd_group) > 1",
        new="get_pg_size(embd_group) > 1 and not model[0].ddp_config.overlap_grad_reduce",
        layout={"pp": 2, "dp": 2},
        config={
            "model.share_embeddings_and_output_weights": True,
            "ddp.overlap_grad_reduce": True,
        },
        modules=r"embedding(\.word_embeddings)?|output_layer|gradient reduction",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-pipeline-counts-last-micro-batch",
        what="1F1B divides by the tokens of the last micro-batch instead of all of them",
        target=f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
        old="        total_num_tokens += num_tokens\n\n        if forward_only:",
        new="        total_num_tokens = num_tokens\n\n        if forward_only:",
        layout={"pp": 2},
        modules="schedule|loss|gradient reduction",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-second-chunk-not-finalized",
        what="the interleaved schedule finalizes the gradients of its first chunk only",
        target=f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving",
        old="            model,\n            total_num_tokens if",
        new="            model[:1],\n            total_num_tokens if",
        layout={"pp": 2, "vpp": 2},
        config={"model.num_layers": 4},
        modules=rf"{_SECOND_CHUNK}|schedule|gradient reduction",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-schedule-steps-for-each-chunk",
        what="the learning rate moves on once for every chunk of a virtual pipeline",
        target="ascend_run.core.train.step:TrainStep.__call__",
        old="self.bundle.scheduler.step(increment=1)",
        new="self.bundle.scheduler.step(increment=len(self.bundle.chunks))",
        layout={"pp": 2, "vpp": 2},
        config={"model.num_layers": 4},
        modules="optimizer",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-parameters-gathered-once",
        what="with overlapped gathers a bucket is gathered before the first step only",
        target=f"{_BUCKETS}.finish_grad_sync",
        old="self.param_gather_dispatched = False",
        new="self.param_gather_dispatched &= not self.is_first_batch",
        layout={"dp": 2},
        config={
            "ddp.use_distributed_optimizer": True,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": True,
        },
        modules=r"optimizer|embedding(\.word_embeddings)?",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-shard-takes-first-part-of-gradient",
        what="a share of a parameter is stepped by the gradient of the parameter's beginning",
        target=f"{_SPREAD}._copy_model_grads_to_main_grads",
        old="model_grad.view(-1)[param_range.start : param_range.end]",
        new="model_grad.view(-1)[: param_range.size]",
        layout={"dp": 4},
        config={"ddp.use_distributed_optimizer": True},
        modules=(
            r"optimizer|decoder\.layers\.0\.self_attention\.linear_qkv|"
            r"decoder\.layers\.1\.mlp\.linear_fc1"
        ),
        hides_from_loss=True,
    ),
    Bug(
        name="blind-norm-of-local-experts",
        what="the clipping norm sums over this rank's experts only",
        target="ascend_run.core.train.optimizer_kinds:expert_kind",
        old="groups.tp_ep_pp",
        new="groups.mp",
        layout={"ep": 2, "dp": 2},
        model="moe",
        config={"optimizer.clip_grad": 0.05},
        modules="optimizer",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-label-taken-off-on-every-rank",
        what="ranks without a token's label subtract its one hot from their first row",
        target="ascend_run.ops.linear_cross_entropy:_Labels._over_ranks",
        old="-is_local_C1.to(logits_CV.dtype)",
        new="torch.full_like(total, -1.0)",
        layout={"tp": 2, "sp": 1},
        modules="loss|output_layer",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-loss-splits-hidden-gradient",
        what="the gradient of the gathered hidden state is cut, not summed over vocabulary parts",
        target="ascend_run.core.model.gpt:GPT._whole_hidden",
        old="tensor_parallel_output_grad=True",
        new="tensor_parallel_output_grad=False",
        layout={"tp": 2, "sp": 1},
        modules=r"output_layer|loss|decoder\.final_layernorm",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-loss-reported-of-one-context-rank",
        what="the reported loss is the mean over one context-parallel rank's tokens",
        target="ascend_run.core.train.step:ForwardBackward._total",
        old="group=self.groups.dp_cp",
        new="group=self.groups.dp",
        plugins=("ulysses",),
        layout={"cp": 2},
        modules="loss",
    ),
    Bug(
        name="blind-tokens-of-one-context-rank",
        what="gradients are divided by the tokens of one context-parallel rank",
        target=f"{_FINALIZE}:finalize_model_grads",
        old="torch.distributed.all_reduce(num_tokens, group=dp_cp_group)",
        new="torch.distributed.all_reduce(num_tokens, group=pg_collection.dp)",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules="loss|gradient reduction",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-ulysses-mixes-repeated-heads",
        what="the gradients of repeated key-value heads are summed in the wrong order of axes",
        target="ascend_run.plugins.ulysses.kernel:_sum_repeats",
        old="gradient.unflatten(-2, (-1, repeat)).sum(-2)",
        new="gradient.unflatten(-2, (repeat, -1)).sum(-3)",
        plugins=("ulysses",),
        layout={"cp": 4},
        modules=_ATTENTION,
        hides_from_loss=True,
    ),
    Bug(
        name="blind-ring-keeps-last-query-gradient",
        what="a later step of the ring replaces the query gradient of an earlier one",
        target=f"{_RING}.sums:RowSums.add",
        old="self._parts[block.queries].add_(dq)",
        new="self._parts[block.queries] = dq.to(sum_dtype(self._q))",
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_ATTENTION,
        hides_from_loss=True,
    ),
    Bug(
        name="blind-ring-share-of-updated-total",
        what="a block's share of the output is taken from the total that it is in already",
        target="ascend_run.ops.log_sum_exp:merge_into",
        old=(
            "    share = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)\n"
            "    lse.copy_(torch.logaddexp(lse, more_lse))\n"
        ),
        new=(
            "    lse.copy_(torch.logaddexp(lse, more_lse))\n"
            "    share = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)\n"
        ),
        plugins=("ring-attention",),
        layout={"cp": 2},
        modules=_ATTENTION,
    ),
    Bug(
        name="blind-alltoall-restores-by-wrong-sizes",
        what="the experts' outputs are cut by the counts of the other order",
        target=f"{_DISPATCHERS}:MoEAlltoAllTokenDispatcher.combine_preprocess",
        old="self.num_global_tokens_per_local_expert.T.ravel()",
        new="self.num_global_tokens_per_local_expert.ravel()",
        layout={"ep": 2, "dp": 2},
        model="moe",
        modules=_EXPERTS,
    ),
    Bug(
        name="blind-gathered-probabilities-detached",
        what="the router gets no gradient through experts that are cut",
        target=f"{_DISPATCHERS}:MoEAlltoAllTokenDispatcher.dispatch_postprocess",
        old="            global_probs, group=self.tp_group, output_split_sizes=output_split_sizes",
        new=(
            "            global_probs.detach(), group=self.tp_group, "
            "output_split_sizes=output_split_sizes"
        ),
        layout={"tp": 2, "sp": 1, "expt_tp": 2},
        model="moe",
        modules=rf"{_ROUTER}|decoder\.layers\.\d+\.mlp",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-uncut-experts-reduced-as-dense",
        what="experts that tensor-parallel ranks hold copies of are not summed over those ranks",
        target="ascend_run.core.model.experts:Experts.__init__",
        old="and config.expert_tensor_parallel_size == config.tensor_model_parallel_size",
        new="and config.expert_tensor_parallel_size <= config.tensor_model_parallel_size",
        layout={"tp": 2, "sp": 1, "expt_tp": 1},
        model="moe",
        modules=rf"{_EXPERTS}|gradient reduction",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-balance-without-context-ranks",
        what="the balancing loss counts the tokens of one context-parallel rank",
        target="ascend_run.core.model.router:Router._with_aux_loss",
        old="group=self.tp_cp_group)",
        new="group=self.tp_group)",
        plugins=("ring-attention",),
        layout={"cp": 2},
        model="moe",
        modules=_ROUTER,
        hides_from_loss=True,
    ),
    Bug(
        name="blind-gmm-keeps-last-micro-batch",
        what="fused accumulation overwrites what earlier micro-batches have added",
        target="ascend_run.ops.grouped_matmul:LoopGroups.add_outer",
        old="total.addmm_(a.t(), b)",
        new="total.addmm_(a.t(), b, beta=0)",
        plugins=("gmm",),
        layout={"dp": 2},
        model="moe",
        config={"plugins.gmm.gradient_accumulation_fusion": True},
        modules=_EXPERTS,
        hides_from_loss=True,
    ),
    Bug(
        name="blind-swap-forgets-strides",
        what="a view comes back with its values in the order of its storage",
        target="ascend_run.plugins.swap_attention.swapper:Call.unpack",
        old="like.set_(storage, kept.offset, kept.size, kept.stride)",
        new="like.set_(storage, kept.offset, kept.size)",
        plugins=("swap-attention",),
        config={"plugins.swap-attention.min_bytes": 1},
        modules=_ATTENTION,
        hides_from_loss=True,
    ),
    Bug(
        name="blind-lora-gradient-of-a-not-summed",
        what="a column-parallel adapter does not sum the gradient of its narrow product",
        target="ascend_run.plugins.lora.adapter:Adapter._exchanged",
        old="tensor_parallel_output_grad=True",
        new="tensor_parallel_output_grad=False",
        plugins=("lora",),
        layout={"tp": 2, "sp": 1},
        config={"plugins.lora.export": False},
        modules=r"decoder\.layers\.\d+\.(self_attention\.linear_qkv|mlp\.linear_fc1)(\.adapter)?",
        hides_from_loss=True,
    ),
    Bug(
        name="blind-lora-recomputed-without-gradient",
        what="the first layer's adapters are recomputed from an input that wants no gradient",
        target="ascend_run.plugins.lora.freezing:begin_graph",
        old="not out.requires_grad",
        new="out.requires_grad",
        plugins=("lora", "swap-attention"),
        config={
            "plugins.lora.export": False,
            "plugins.lora.target_modules": ("linear_fc1", "linear_fc2"),
            "plugins.swap-attention.recompute_mlp_layers": 1,
        },
        modules=r"decoder\.layers\.0\.mlp(\..*)?|embedding(\.word_embeddings)?",
        hides_from_loss=True,
    ),
)
