"""Random tiny models in Hugging Face format and in ours.

Our form is written here by reshaping and concatenating whole tensors, and shares no code with the
engine, which copies runs of rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from ascend_run.plugin_api import ModelFamily, RunConfig
from tests.support.tiny_configs import model_fields, parallel_fields

from .toy_families import DENSE, SPARSE

# V vocabulary, H hidden size, N query heads, G key-value heads, D head width, F feed-forward width


@attrs.frozen(kw_only=True)
class TinyModel:
    """Sizes of a model; with experts it is laid out as a Mixtral, without as a Llama."""

    layers: int = 2
    hidden: int = 12
    groups: int = 2
    heads_per_group: int = 2
    head_dim: int = 4
    ffn: int = 10
    vocab: int = 37
    padded_vocab: int = 40
    experts: int = 0
    tied: bool = False
    family: ModelFamily = attrs.field(
        default=attrs.Factory(lambda self: SPARSE if self.experts else DENSE, takes_self=True),
        repr=False,
    )

    @property
    def heads(self) -> int:
        return self.groups * self.heads_per_group

    def config_json(self) -> dict[str, Any]:
        """As transformers 5 writes it."""
        common = {
            "architectures": [self.family.architecture],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "float32",
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn,
            "max_position_embeddings": 64,
            "model_type": self.family.model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.groups,
            "pad_token_id": None,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.23.0",
            "use_cache": True,
            "vocab_size": self.vocab,
        }
        if not self.experts:
            return common | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
        return common | {
            "num_experts_per_tok": 2,
            "num_local_experts": self.experts,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }

    def run_config(self, **changes: Any) -> RunConfig:
        """What a resolved run of this model says in ``[model]``."""
        ours = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "vocab_size": self.vocab,
            "share_embeddings_and_output_weights": self.tied,
            "max_position_embeddings": 64,
            "init_method_std": 0.02,
            "num_moe_experts": self.experts or None,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.001,
            "moe_ffn_hidden_size" if self.experts else "ffn_hidden_size": self.ffn,
            "rotary_base": 10000.0,
        }
        defaults = {
            name.removeprefix("model."): value for name, value in self.family.defaults.items()
        }
        return RunConfig(model=model_fields(defaults | ours | changes), parallel=parallel_fields())

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, as transformers stores them."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
                f"{at}.self_attn.q_proj.weight": (self.heads * self.head_dim, self.hidden),
                f"{at}.self_attn.k_proj.weight": (self.groups * self.head_dim, self.hidden),
                f"{at}.self_attn.v_proj.weight": (self.groups * self.head_dim, self.hidden),
                f"{at}.self_attn.o_proj.weight": (self.hidden, self.heads * self.head_dim),
            }
            if not self.experts:
                shapes |= {
                    f"{at}.mlp.gate_proj.weight": (self.ffn, self.hidden),
                    f"{at}.mlp.up_proj.weight": (self.ffn, self.hidden),
                    f"{at}.mlp.down_proj.weight": (self.hidden, self.ffn),
                }
                continue
            moe = f"{at}.block_sparse_moe"
            shapes[f"{moe}.gate.weight"] = (self.experts, self.hidden)
            for expert in range(self.experts):
                shapes |= {
                    f"{moe}.experts.{expert}.w1.weight": (self.ffn, self.hidden),
                    f"{moe}.experts.{expert}.w2.weight": (self.hidden, self.ffn),
                    f"{moe}.experts.{expert}.w3.weight": (self.ffn, self.hidden),
                }
        return shapes

    def hf_tensors(self, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=generator)
            for name, shape in self.hf_shapes().items()
        }

    def parameters(self, hf: dict[str, Tensor]) -> dict[str, Tensor]:
        """Our whole parameters, from whole stored tensors."""
        ours = {
            "embedding.word_embeddings.weight": self._padded(hf["model.embed_tokens.weight"]),
            "decoder.final_layernorm.weight": hf["model.norm.weight"],
        }
        if not self.tied:
            ours["output_layer.weight"] = self._padded(hf["lm_head.weight"])
        for layer in range(self.layers):
            at, ours_at = f"model.layers.{layer}", f"decoder.layers.{layer}"
            q, k, v = (hf[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv")
            by_group = [x.view(self.groups, -1, self.hidden) for x in (q, k, v)]
            ours |= {
                f"{ours_at}.input_layernorm.weight": hf[f"{at}.input_layernorm.weight"],
                f"{ours_at}.pre_mlp_layernorm.weight": hf[f"{at}.post_attention_layernorm.weight"],
                f"{ours_at}.self_attention.linear_qkv.weight": torch.cat(by_group, 1).flatten(0, 1),
                f"{ours_at}.self_attention.linear_proj.weight": hf[f"{at}.self_attn.o_proj.weight"],
            }
            if not self.experts:
                gate, up, down = (
                    hf[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
                )
                ours[f"{ours_at}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
                ours[f"{ours_at}.mlp.linear_fc2.weight"] = down
                continue
            w1, w2, w3 = (
                torch.stack(
                    [
                        hf[f"{at}.block_sparse_moe.experts.{expert}.{part}.weight"]
                        for expert in range(self.experts)
                    ]
                )
                for part in ("w1", "w2", "w3")
            )
            ours[f"{ours_at}.mlp.router.weight"] = hf[f"{at}.block_sparse_moe.gate.weight"]
            ours[f"{ours_at}.mlp.experts.fc1"] = torch.cat([w1, w3], dim=1)
            ours[f"{ours_at}.mlp.experts.fc2"] = w2
        return ours

    def write(self, folder: Path, hf: dict[str, Tensor], files: int = 1) -> Path:
        """A folder as save_pretrained makes it, in one file or in several with an index."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config_json()))
        if files == 1:
            save_file(hf, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for number in range(files):
            file = f"model-{number + 1:05}-of-{files:05}.safetensors"
            part = dict(list(hf.items())[number::files])
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def _padded(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.zeros(self.padded_vocab - self.vocab, self.hidden)])
