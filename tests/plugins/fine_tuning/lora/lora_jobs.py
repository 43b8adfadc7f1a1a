"""Jobs of a pool's rank with an adapted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from tests.support.small_runs import Values, standing_rank


@attrs.frozen
class Outcome:
    """Results of one forward and backward on one rank."""

    logits_BSV: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    """By names in the model; only of trained parameters."""
    trained: list[str]
    """Parameters that require a gradient."""
    merged_logits_BSV: Tensor | None = None


def run_once(
    values: Values,
    tokens: Tensor,
    labels: Tensor,
    enable: Sequence[str] = ("lora",),
    merges: bool = True,
) -> Outcome:
    """Load, forward, backward in float32, on one rank; then merge the adapters, and forward."""
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.core.model.build import build_model
    from ascend_run.plugins.fine_tuning.lora.magnitudes import merge

    with standing_rank(values, enable) as (hooks, context):
        config = context.config
        bundle = build_model(config, hooks, context.groups, context.device, dtype=torch.float32)
        if config.model.hf_path:
            family = hooks.require("ascend_model_family")
            load_model(config.model.hf_path, family, config, bundle)
        (model,) = bundle.chunks
        logits = model(tokens).detach()
        loss = model(tokens, labels=labels, loss_mask=torch.ones_like(labels).float())
        loss.backward()
        parameters = dict(model.named_parameters())
        gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        trained = [n for n, p in parameters.items() if p.requires_grad]
        if not merges:
            return Outcome(logits, loss.detach(), gradients, trained)
        merge(model)
        with torch.no_grad():
            merged = model(tokens)
        return Outcome(logits, loss.detach(), gradients, trained, merged)


def gradients_of_step(values: Values) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter in a task's first step in float64."""
    from ascend_run.testing.dry_run import DryRun, gradient_of

    with standing_rank(values, ("lora",)) as (hooks, context):
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        dry_run.load_weights()
        samples = dry_run.task_samples(context.config.train.global_batch_size)
        assert samples is not None
        dry_run.gradients(forward_backward, dry_run.batches(samples, first=0))
        (chunk,) = dry_run.bundle.chunks
        parameters = {n.removeprefix("module."): p for n, p in chunk.named_parameters()}
        found = {n: gradient_of(p) for n, p in parameters.items() if p.requires_grad}
        return {name: g.clone() for name, g in found.items() if g is not None}


def reference_logits(values: Values, tokens: Tensor) -> list[Tensor]:
    """Return the logits of a model from an adapter: changed since, without adapters, as loaded."""
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.core.model.build import build_model
    from ascend_run.plugins.fine_tuning.lora.as_reference import as_loaded, switched_off
    from ascend_run.plugins.fine_tuning.lora.expert_adapter import every_adapter

    with standing_rank(values, ("lora",)) as (hooks, context), torch.no_grad():
        config = context.config
        bundle = build_model(config, hooks, context.groups, context.device, dtype=torch.float32)
        load_model(config.model.hf_path, hooks.require("ascend_model_family"), config, bundle)
        (model,) = bundle.chunks
        adapters = every_adapter(model)
        for parameter in (p for adapter in adapters for p in adapter.parameters()):
            parameter.mul_(1.5)
        changed = model(tokens)
        with switched_off(adapters):
            off = model(tokens)
        with as_loaded(adapters):
            return [changed, off, model(tokens)]


def hf_names(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename ours to PEFT's names, written out by hand."""
    parts = {
        "self_attention.linear_qkv": {"linear_q": "q_proj", "linear_k": "k_proj",
                                      "linear_v": "v_proj"},
        "self_attention.linear_q_proj": {"linear_q_proj": "q_proj"},
        "self_attention.linear_q_down_proj": {"linear_q_down_proj": "q_a_proj"},
        "self_attention.linear_q_up_proj": {"linear_q_up_proj": "q_b_proj"},
        "self_attention.linear_kv_down_proj": {"linear_kv_down_proj": "kv_a_proj_with_mqa"},
        "self_attention.linear_kv_up_proj": {"linear_kv_up_proj": "kv_b_proj"},
        "self_attention.linear_proj": {"linear_proj": "o_proj"},
        "mlp.linear_fc1": {"linear_fc1_gate": "gate_proj", "linear_fc1_up": "up_proj"},
        "mlp.linear_fc2": {"linear_fc2": "down_proj"},
        "mlp.shared_experts": {"shared_experts_fc1_gate": "gate_proj",
                               "shared_experts_fc1_up": "up_proj",
                               "shared_experts_fc2": "down_proj"},
    }  # fmt: skip
    named: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if ".adapter." not in name:
            named[_in_full(name)] = gradient
            continue
        _, _, layer, module, linear, _, *rest = name.split(".")
        owner = {"self_attention": "self_attn", "mlp": "mlp"}[module]
        at = f"base_model.model.model.layers.{layer}.{owner}"
        if linear == "experts":
            named |= _of_experts(name, f"{at}.experts", gradients)
            continue
        own = parts[f"{module}.{linear}"]
        if linear == "shared_experts":
            at, rest = f"{at}.shared_experts", rest[1:]
        if rest == ["lora_A"]:
            of_b = {part: gradients.get(name.replace("lora_A", f"lora_B.{part}")) for part in own}
            ranks = {part: b.shape[1] for part, b in of_b.items() if b is not None}
            for part, block in zip(ranks, gradient.split([*ranks.values()]), strict=True):
                named[f"{at}.{own[part]}.lora_A.weight"] = block
        elif rest[0] == "lora_magnitude":
            named[f"{at}.{own[rest[1]]}.lora_magnitude_vector"] = gradient
        else:
            named[f"{at}.{own[rest[1]]}.lora_B.weight"] = gradient
    return named


def _of_experts(name: str, at: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and stack what belongs to one matrix of PEFT: A is [E R, in], B [out, R E]."""
    start, _, end = name.rpartition("adapter.")
    has_both = f"{start}adapter.lora_A.experts_fc2" in gradients
    inner = ".base_layer" if has_both and "experts_fc1" in end else ""
    if end.startswith("lora_A"):
        return {f"{at}{inner}.lora_A.weight": gradients[name].flatten(0, 1)}
    if end.endswith("_up"):
        return {}
    b = gradients[name]
    if end.endswith("_gate"):
        b = torch.cat([b, gradients[name.replace("_gate", "_up")]], dim=1)
    return {f"{at}{inner}.lora_B.weight": b.permute(1, 2, 0).flatten(1)}


def _in_full(name: str) -> str:
    """Rename a parameter that is trained in full, as written out by hand."""
    ends = {
        "embedding.word_embeddings": "model.embed_tokens",
        "output_layer": "lm_head",
        "score": "score",
        "decoder.final_layernorm": "model.norm",
    }
    owner, _, kind = name.rpartition(".")
    if owner not in ends:
        _, _, layer, module = owner.split(".", 3)
        inner = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "mlp.router": "mlp.gate",
            "self_attention.q_layernorm": "self_attn.q_a_layernorm",
            "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        }[module]
        return f"base_model.model.model.layers.{layer}.{inner}.{kind}"
    return f"base_model.model.{ends[owner]}.{kind}"


def base_values(base: str, adapter: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return config values of a run that adapts a tiny Llama, or the ``model__family`` named."""
    from .peft_models import ALPHA, RANK

    return {
        "model.family": "llama",
        "model.hf_path": base,
        "model.make_vocab_size_divisible_by": 8,
        "data.seq_length": 16,
        "train.precision": "fp32",
        "plugins.lora.rank": RANK,
        "plugins.lora.alpha": float(ALPHA),
        **({} if adapter is None else {"plugins.lora.load": adapter}),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
