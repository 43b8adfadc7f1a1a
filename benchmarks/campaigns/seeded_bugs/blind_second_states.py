"""Bugs by the author of ``blind_second``: in random streams, in resumed runs, and between ranks."""

from __future__ import annotations

from typing import Final

from .blind_second import ATTENTION, BIASED_ROUTER, LATENT, LINEARS, ROUTER
from .bug import BACKWARD, FORWARD, OPTIMIZER, RESUME, Bug

_LAYER: Final = r"decoder\.layers\.\d+(\.\w+)*"

_RANDOM: Final = (
    Bug(
        name="blind2-recompute-draws-another-mask",
        what="a recomputed layer draws new dropout masks: the random state is not set back",
        target="megatron.core.tensor_parallel.random:CheckpointFunction.backward",
        old="_set_all_rng_states(*ctx.rng_states)",
        new="pass",
        config={
            "model.hidden_dropout": 0.1,
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        },
        modules=rf"{_LAYER}|random streams",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-attention-drops-one-pattern-for-ever",
        what="the seed of attention dropout is the run's: every layer and step drops the same",
        target="ascend_run.core.model.attention:CoreAttention._dropout",
        old="seed = int(torch.randint(2**62, ()))",
        new="seed = torch.initial_seed()",
        config={"model.attention_dropout": 0.1},
        modules=rf"{ATTENTION}|random streams",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-tensor-ranks-drop-the-same-heads",
        what="tensor-parallel ranks draw one attention dropout mask for their different heads",
        target="ascend_run.core.model.attention:CoreAttention._dropout",
        old="for group in (self.tp_group, self.dp_group):",
        new="for group in (self.dp_group,):",
        layout={"tp": 2},
        config={"model.attention_dropout": 0.1},
        modules=rf"{ATTENTION}|random streams",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-sequence-shards-drop-the-same-places",
        what="with sequence parallelism all ranks draw one dropout mask for their different tokens",
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        old="rng_context = tensor_parallel.get_cuda_rng_tracker().fork()",
        new="rng_context = nullcontext()",
        layout={"tp": 2, "sp": 1},
        config={"model.hidden_dropout": 0.1},
        modules=rf"{_LAYER}|random streams",
        phases=(FORWARD,),
    ),
    Bug(
        name="blind2-lora-drops-a-shared-input-twice",
        what="tensor-parallel ranks drop different entries of an input that they share",
        target="ascend_run.plugins.fine_tuning.lora.adapter:Adapter.dropped",
        old="is_shared = self.is_column and not self.sequence_parallel",
        new="is_shared = False",
        plugins=("lora",),
        layout={"tp": 2},
        config={"plugins.lora.rank": 4, "plugins.lora.dropout": 0.1},
        modules=rf"{LINEARS}|random streams",
        phases=(FORWARD, BACKWARD),
        hides_from_loss=True,
    ),
)

# They need a run that stops, saves and resumes.
_RESUMED: Final = (
    Bug(
        name="blind2-resume-restarts-bias-correction",
        what="in a resumed run Adam's step count is 0 again, beside moments that are restored",
        target="ascend_run.core.checkpoint.optimizer_shards:_scalar_shards",
        old="tensor=state.detach(),",
        new="tensor=state.detach().clone(),",
        resume=True,
        modules="optimizer|optimizer state",
        phases=(RESUME, OPTIMIZER),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-resume-forgets-expert-bias",
        what="the router's expert bias is not saved: a resumed run starts with zeros",
        target="ascend_run.core.model.router:Router.__init__",
        old='("expert_bias", True)',
        new='("expert_bias", False)',
        model="moe",
        config={**BIASED_ROUTER, "model.moe_router_bias_update_rate": 0.05},
        resume=True,
        modules=rf"{ROUTER}|weights",
        phases=(RESUME, FORWARD),
    ),
    Bug(
        name="blind2-resume-rounds-main-parameters",
        what="a resumed run takes its float32 parameters from the bfloat16 ones, not those saved",
        target="ascend_run.core.train.checkpointing:Checkpoints._load",
        old="entries.restore(values)",
        new="entries.restore(values); "
        "[b.optimizer.reload_model_params() for b in self.context.models.values() if b.trains]",
        config={"train.precision": "bf16"},
        resume=True,
        modules="optimizer|optimizer state",
        phases=(RESUME, OPTIMIZER),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-resume-counts-micro-batches-once",
        what="a resumed run continues at step * micro-batch size: it reads samples again",
        target="ascend_run.core.checkpoint.entries:Progress.load_state_dict",
        old="self._context.consumed_samples = progress.consumed_samples",
        new="self._context.consumed_samples = "
        "progress.step * self._context.config.train.micro_batch_size",
        config={"train.micro_batch_size": 1, "train.global_batch_size": 4},
        resume=True,
        modules="batch|data order",
        phases=(RESUME, FORWARD),
    ),
)

_PARALLEL: Final = (
    Bug(
        name="blind2-experts-clip-by-their-own-norm",
        what="dense and expert gradients are each clipped by the norm of their own optimizer",
        target="ascend_run.core.train.optimizer:_Chained.step",
        old="_clip(part, norm)",
        new="_clip(part, float(part.get_grad_norm()))",
        layout={"ep": 2, "dp": 2},
        model="moe",
        config={"optimizer.clip_grad": 0.05},
        modules="optimizer|gradient norm",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-latent-norm-summed-over-tensor-ranks",
        what="the whole gradient of the query latents' norm, on every rank, is summed over ranks",
        target="ascend_run.core.model.latent_attention:LatentAttention.__init__",
        old="parameter.register_hook(lambda gradient: gradient / ranks)",
        new="parameter.register_hook(lambda gradient: gradient)",
        layout={"tp": 2},
        config=LATENT,
        modules=r"decoder\.layers\.\d+\.self_attention(\.q_layernorm)?|gradient reduction",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="blind2-swap-finds-copies-by-size",
        what="offloaded activations of one size share a host copy, that of the first of them",
        target="ascend_run.ops.swapping.call:Call.pack",
        old="block = self._leaving.get(key)",
        new="block = next((b for b in self._leaving.values() "
        "if b.host.numel() == storage.nbytes()), None)",
        plugins=("swap-attention",),
        config={"plugins.swap-attention.min_bytes": 1},
        modules=r"decoder\.layers\.\d+\.self_attention(\.\w+)*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
)

BUGS: Final = (*_RANDOM, *_RESUMED, *_PARALLEL)
