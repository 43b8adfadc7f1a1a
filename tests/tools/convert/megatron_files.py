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


def hugging_face(folder: Path, *, experts: bool = False, tied: bool = False) -> dict[str, Tensor]:
    """Write a tiny Llama or Mixtral of random weights; return its tensors."""
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
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            hf[f"{at}self_attn.{part}_proj.weight"] = random(heads * WIDTH, HIDDEN)
        hf[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * WIDTH)
        if not experts:
            for part, shape in (
                ("gate", (FFN, HIDDEN)),
                ("up", (FFN, HIDDEN)),
                ("down", (HIDDEN, FFN)),
            ):
                hf[f"{at}mlp.{part}_proj.weight"] = random(*shape)
            continue
        hf[f"{at}block_sparse_moe.gate.weight"] = random(EXPERTS, HIDDEN)
        for n in range(EXPERTS):
            for part, shape in (
                ("w1", (FFN, HIDDEN)),
                ("w3", (FFN, HIDDEN)),
                ("w2", (HIDDEN, FFN)),
            ):
                hf[f"{at}block_sparse_moe.experts.{n}.{part}.weight"] = random(*shape)
    config = {
        "model_type": "mixtral" if experts else "llama",
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": tied,
        **({"num_local_experts": EXPERTS} if experts else {}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(hf, folder / "model.safetensors", metadata={"format": "pt"})
    return hf


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
        last = pp == len(self.stages) - 1 and number == len(self.stages[pp]) - 1
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
        norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        if self.engine:
            norms[0] = "self_attention.linear_qkv.layer_norm_weight"
            if not self.experts:
                norms[1] = "mlp.linear_fc1.layer_norm_weight"
        q, k, v, o = (hf[f"{at}self_attn.{part}_proj.weight"] for part in "qkvo")
        each = HEADS // GROUPS * WIDTH
        qkv = [
            part
            for g in range(GROUPS)
            for part in (
                q[g * each : (g + 1) * each],
                k[g * WIDTH : (g + 1) * WIDTH],
                v[g * WIDTH : (g + 1) * WIDTH],
            )
        ]
        columns = HEADS * WIDTH // self.tp
        state = {
            norms[0]: hf[f"{at}input_layernorm.weight"],
            "self_attention.linear_qkv.weight": torch.cat(qkv).chunk(self.tp)[tp],
            "self_attention.linear_proj.weight": o[:, tp * columns : (tp + 1) * columns],
            norms[1]: hf[f"{at}post_attention_layernorm.weight"],
        }
        if self.experts:
            state["mlp.router.weight"] = hf[f"{at}block_sparse_moe.gate.weight"]
            return state | self._experts(hf, at, tp, ep)
        gate, up, down = (hf[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        f = slice(tp * FFN // self.tp, (tp + 1) * FFN // self.tp)
        state["mlp.linear_fc1.weight"] = torch.cat([gate[f], up[f]])
        state["mlp.linear_fc2.weight"] = down[:, f]
        return state

    def _experts(self, hf: Mapping[str, Tensor], at: str, tp: int, ep: int) -> dict[str, Tensor]:
        """Return a rank's experts; ``weight1`` has the memory of [e, H, 2f]."""
        count, first, parts = EXPERTS // self.ep, ep * EXPERTS // self.ep, self.expert_tp or self.tp
        if self.extended:
            count, parts = count // self.tp, 1
            first = (ep * self.tp + tp) * count
        index = tp % parts
        f = slice(index * FFN // parts, (index + 1) * FFN // parts)
        experts = [f"{at}block_sparse_moe.experts.{n}" for n in range(first, first + count)]
        fc1 = [torch.cat([hf[f"{one}.w1.weight"][f], hf[f"{one}.w3.weight"][f]]) for one in experts]
        fc2 = [hf[f"{one}.w2.weight"][:, f] for one in experts]
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
