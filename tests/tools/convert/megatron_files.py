"""Checkpoints as Megatron and MindSpeed lay them out, written from the rules alone.

Whole tensors of a Hugging Face folder are cut with plain indexing. Nothing is shared with the
package: names, shards and pickles are made here.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, GROUPS, WIDTH, HIDDEN, FFN, EXPERTS, VOCABULARY = 4, 2, 4, 16, 24, 8, 37
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 8, 10, 4, 6, 3
"""Of latent attention; the rows of the keys' down projection are not divided at their latent."""


def hugging_face(
    folder: Path,
    *,
    experts: bool = False,
    tied: bool = False,
    latent: str = "",
    groups: int = GROUPS,
) -> dict[str, Tensor]:
    """Write a tiny Llama, Mixtral or DeepSeek-V2 of random weights; return its tensors.

    Args:
        latent: DeepSeek-V2, with queries from a latent (``queries``) or without (``plain``).
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    hf = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": random(HIDDEN),
    }
    if not tied:
        hf["lm_head.weight"] = random(VOCABULARY, HIDDEN)
    for layer in range(4):
        at = f"model.layers.{layer}."
        hf[f"{at}input_layernorm.weight"] = random(HIDDEN)
        hf[f"{at}post_attention_layernorm.weight"] = random(HIDDEN)
        if latent:
            shapes = latent_shapes(latent)
            hf |= {f"{at}self_attn.{part}.weight": random(*of) for part, of in shapes.items()}
        else:
            for part, heads in (("q", HEADS), ("k", groups), ("v", groups)):
                hf[f"{at}self_attn.{part}_proj.weight"] = random(heads * WIDTH, HIDDEN)
            hf[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * WIDTH)
        gated = [f"{at}mlp."] if not experts or (latent and not layer) else []
        if latent and layer:
            hf[f"{at}mlp.gate.weight"] = random(EXPERTS, HIDDEN)
            gated = [f"{at}mlp.shared_experts.", *(f"{at}mlp.experts.{n}." for n in range(EXPERTS))]
        for of in gated:
            for part, shape in (
                ("gate", (FFN, HIDDEN)),
                ("up", (FFN, HIDDEN)),
                ("down", (HIDDEN, FFN)),
            ):
                hf[f"{of}{part}_proj.weight"] = random(*shape)
        if gated:
            continue
        hf[f"{at}block_sparse_moe.gate.weight"] = random(EXPERTS, HIDDEN)
        for n in range(EXPERTS):
            for part, shape in (
                ("w1", (FFN, HIDDEN)),
                ("w3", (FFN, HIDDEN)),
                ("w2", (HIDDEN, FFN)),
            ):
                hf[f"{at}block_sparse_moe.experts.{n}.{part}.weight"] = random(*shape)
    kind = "deepseek_v2" if latent else "mixtral" if experts else "llama"
    return write_hugging_face(
        folder,
        kind,
        hf,
        num_key_value_heads=HEADS if latent else groups,
        tie_word_embeddings=tied,
        **({"num_local_experts": EXPERTS} if experts and not latent else {}),
        **(latent_config(latent) if latent else {}),
    )


def write_hugging_face(
    folder: Path, kind: str, hf: dict[str, Tensor], **config: object
) -> dict[str, Tensor]:
    """Write a folder of four layers with the sizes above; return its tensors.

    Args:
        kind: The ``model_type``.
        config: Further keys of ``config.json``.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
    }
    names = [f"{kind.title().replace('_', '')}ForCausalLM"]
    folder.mkdir()
    text = json.dumps({"model_type": kind, "architectures": names, **sizes, **config})
    (folder / "config.json").write_text(text)
    save_file(hf, folder / "model.safetensors", metadata={"format": "pt"})
    return hf


def latent_shapes(latent: str) -> dict[str, tuple[int, ...]]:
    queries: dict[str, tuple[int, ...]] = {"q_proj": (HEADS * (NOPE + ROPE), HIDDEN)}
    if latent == "queries":
        queries = {
            "q_a_proj": (Q_RANK, HIDDEN),
            "q_a_layernorm": (Q_RANK,),
            "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
        }
    return {
        **queries,
        "kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
        "kv_a_layernorm": (KV_RANK,),
        "kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
        "o_proj": (HIDDEN, HEADS * VALUE),
    }


def latent_config(latent: str) -> dict[str, object]:
    return {
        "q_lora_rank": Q_RANK if latent == "queries" else None,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": FFN,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
    }


@attrs.frozen(kw_only=True)
class Files:
    """A layout. ``stages`` lists the layers of every chunk: stage -> chunk -> layer or None."""

    tp: int = 1
    ep: int = 1
    stages: Sequence[Sequence[Sequence[int | None]]] = (((0, 1, 2, 3),),)
    experts: str = ""
    """``one`` by one, ``numbered``, ``grouped``; empty: a dense model."""
    expert_tp: int | None = None
    extended: bool = False
    engine: bool = False
    latent: str = ""
    """As in ``hugging_face``."""
    mindspeed: str = ""
    """Of latent attention: ``concat``, with one ``linear_qkv``; ``split``: and divided ups."""
    dualpipev: bool = False
    """The last layers are on the first stage."""
    tied: bool = False
    padded: int = 256
    """Rows of the padded vocabulary."""
    pairs: Sequence[tuple[int, int]] | None = None
    """(tensor, expert) ranks; None: all."""

    def write(self, folder: Path, hf: Mapping[str, Tensor], **args: Any) -> Path:
        """Write every rank's file, and the file that names the iteration."""
        for (tp, pp, ep), chunks in self.ranks(hf).items():
            name = f"mp_rank_{tp:02d}"
            name += f"_{pp:03d}" if len(self.stages) > 1 else ""
            name += f"_{ep:03d}" if self.ep > 1 else ""
            path = folder / "iter_0000005" / name
            path.mkdir(parents=True)
            state: dict[str, Any] = {"iteration": 5, "checkpoint_version": 3.0}
            if args:
                state["args"] = Namespace(**args)
            keys = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
            # Each tensor with memory of its own, as parameters have it.
            state |= {
                key: {name: tensor.clone() for name, tensor in chunk.items()}
                for key, chunk in zip(keys, chunks, strict=True)
            }
            torch.save(state, path / "model_optim_rng.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("5")
        return folder

    def ranks(
        self, hf: Mapping[str, Tensor]
    ) -> dict[tuple[int, int, int], list[dict[str, Tensor]]]:
        """(tensor, stage, expert) rank -> the tensors of each of its chunks."""
        pairs = self.pairs or [(tp, ep) for tp in range(self.tp) for ep in range(self.ep)]
        return {
            (tp, pp, ep): [
                self._chunk(hf, tp, ep, pp, number, layers) for number, layers in enumerate(chunks)
            ]
            for pp, chunks in enumerate(self.stages)
            for tp, ep in pairs
        }

    def _chunk(
        self,
        hf: Mapping[str, Tensor],
        tp: int,
        ep: int,
        pp: int,
        number: int,
        layers: Sequence[int | None],
    ) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        first = pp == 0 and number == 0
        stage = 0 if self.dualpipev else len(self.stages) - 1
        last = pp == stage and number == len(self.stages[pp]) - 1
        if first:
            state["embedding.word_embeddings.weight"] = self._rows(
                hf["model.embed_tokens.weight"], tp
            )
        for slot, layer in enumerate(layers):
            if layer is not None:
                at = f"decoder.layers.{slot}."
                inner = self._layer(hf, f"model.layers.{layer}.", tp, ep)
                state |= {at + name: tensor for name, tensor in inner.items()}
        if last:
            state["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not self.tied:
                state["output_layer.weight"] = self._rows(hf["lm_head.weight"], tp)
            elif not first:
                state["output_layer.weight"] = self._rows(hf["model.embed_tokens.weight"], tp)
        return state

    def _rows(self, table: Tensor, tp: int) -> Tensor:
        padded = torch.zeros(self.padded, HIDDEN)
        padded[:VOCABULARY] = table
        rows = self.padded // self.tp
        return padded[tp * rows : (tp + 1) * rows]

    def _layer(self, hf: Mapping[str, Tensor], at: str, tp: int, ep: int) -> dict[str, Tensor]:
        sparse = self.experts and not (self.latent and at.endswith(".0."))
        norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        if self.engine and not self.latent:
            norms[0] = "self_attention.linear_qkv.layer_norm_weight"
        if self.engine and not sparse:
            norms[1] = "mlp.linear_fc1.layer_norm_weight"
        attention = self._latent if self.latent else self._attention
        state = {
            norms[0]: hf[f"{at}input_layernorm.weight"],
            **attention(hf, f"{at}self_attn.", tp),
            norms[1]: hf[f"{at}post_attention_layernorm.weight"],
        }
        if not sparse:
            return state | self._gated(hf, f"{at}mlp.", "mlp.", tp)
        router = "mlp.gate" if self.latent else "block_sparse_moe.gate"
        state["mlp.router.weight"] = hf[f"{at}{router}.weight"]
        if self.latent:
            state |= self._gated(hf, f"{at}mlp.shared_experts.", "mlp.shared_experts.", tp)
        return state | self._experts(hf, at, tp, ep)

    def _gated(self, hf: Mapping[str, Tensor], at: str, to: str, tp: int) -> dict[str, Tensor]:
        gate, up, down = (hf[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        f = slice(tp * FFN // self.tp, (tp + 1) * FFN // self.tp)
        return {
            f"{to}linear_fc1.weight": torch.cat([gate[f], up[f]]),
            f"{to}linear_fc2.weight": down[:, f],
        }

    def _attention(self, hf: Mapping[str, Tensor], at: str, tp: int) -> dict[str, Tensor]:
        q, k, v, o = (hf[f"{at}{part}_proj.weight"] for part in "qkvo")
        each, groups = WIDTH * len(q) // len(k), len(k) // WIDTH
        qkv = [
            part
            for g in range(groups)
            for part in (
                q[g * each : (g + 1) * each],
                k[g * WIDTH : (g + 1) * WIDTH],
                v[g * WIDTH : (g + 1) * WIDTH],
            )
        ]
        return {
            "self_attention.linear_qkv.weight": torch.cat(qkv).chunk(self.tp)[tp],
            "self_attention.linear_proj.weight": self._part(o, tp, 1),
        }

    def _latent(self, hf: Mapping[str, Tensor], at: str, tp: int) -> dict[str, Tensor]:
        """Return a rank's latent attention, head by head where heads are divided."""
        hf = {n.removeprefix(at)[:-7]: t for n, t in hf.items() if n.startswith(at)}
        queries = self.latent == "queries"
        state = {"linear_proj.weight": self._part(hf["o_proj"], tp, 1)}
        fused = self.engine and not self.mindspeed
        norm = "linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight"
        state[norm] = hf["kv_a_layernorm"]
        if queries:
            norm = "linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight"
            state[norm] = hf["q_a_layernorm"]
        down = {
            "linear_q_down_proj" if queries else "linear_q_proj": hf[
                "q_a_proj" if queries else "q_proj"
            ],
            "linear_kv_down_proj": hf["kv_a_proj_with_mqa"],
        }
        if self.mindspeed:
            state["linear_qkv.weight"] = torch.cat([*down.values()])
        else:
            state |= {
                f"{name}.weight": whole
                if fused and name != "linear_q_proj"
                else self._part(whole, tp, 0)
                for name, whole in down.items()
            }
        heads = range(tp * HEADS // self.tp, (tp + 1) * HEADS // self.tp)
        keys = hf["kv_b_proj"].view(HEADS, NOPE + VALUE, KV_RANK)
        ups = {"kv": (keys, "linear_kv_nope", "linear_v")}
        if queries:
            values = hf["q_b_proj"].view(HEADS, NOPE + ROPE, Q_RANK)
            ups["q"] = (values, "linear_qk_nope", "linear_qk_rope")
        for up, (of_heads, first, second) in ups.items():
            if self.mindspeed == "split":
                state[f"{first}.weight"] = torch.cat([of_heads[n][:NOPE] for n in heads])
                state[f"{second}.weight"] = torch.cat([of_heads[n][NOPE:] for n in heads])
            else:
                state[f"linear_{up}_up_proj.weight"] = torch.cat([of_heads[n] for n in heads])
        return {f"self_attention.{name}": tensor for name, tensor in state.items()}

    def _part(self, whole: Tensor, tp: int, dim: int) -> Tensor:
        size = whole.shape[dim] // self.tp
        return whole.narrow(dim, tp * size, size)

    def _experts(self, hf: Mapping[str, Tensor], at: str, tp: int, ep: int) -> dict[str, Tensor]:
        """Return a rank's experts; ``weight1`` has the memory of [e, H, 2f]."""
        count, first, parts = EXPERTS // self.ep, ep * EXPERTS // self.ep, self.expert_tp or self.tp
        if self.extended:
            count, parts = count // self.tp, 1
            first = (ep * self.tp + tp) * count
        index = tp % parts
        f = slice(index * FFN // parts, (index + 1) * FFN // parts)
        of = f"{at}mlp.experts" if self.latent else f"{at}block_sparse_moe.experts"
        gate, up, down = (
            ("gate_proj", "up_proj", "down_proj") if self.latent else ("w1", "w3", "w2")
        )
        experts = [f"{of}.{n}" for n in range(first, first + count)]
        fc1 = [torch.cat([hf[f"{one}.{part}.weight"][f] for part in (gate, up)]) for one in experts]
        fc2 = [hf[f"{one}.{down}.weight"][:, f] for one in experts]
        if self.experts == "grouped":
            weight1 = torch.stack([one.t() for one in fc1]).contiguous()
            weight2 = torch.stack([one.t() for one in fc2]).contiguous()
            return {
                "mlp.experts.weight1": weight1.view(HIDDEN, -1),
                "mlp.experts.weight2": weight2.view(-1, HIDDEN),
            }
        name = (
            "mlp.experts.local_experts.{n}.linear_{fc}.weight"
            if self.experts == "one"
            else "mlp.experts.linear_{fc}.weight{n}"
        )
        both = (("fc1", fc1), ("fc2", fc2))
        return {name.format(n=n, fc=fc): one for fc, each in both for n, one in enumerate(each)}
