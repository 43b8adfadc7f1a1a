"""The models of the end-to-end comparisons: their shapes, weights, data and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

LEARNING_RATE: Final = 3e-4
DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@attrs.frozen(kw_only=True)
class Shape:
    """A Llama without grouped queries, biases and tied embeddings, and the batch it trains on.

    With experts each of its MLPs is a mixture of them, as in Mixtral.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    seq_length: int
    micro_batch: int
    experts: int = 0
    topk: int = 0
    """Experts of a token."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.micro_batch * self.seq_length

    def num_parameters(self, *, active: bool = False) -> int:
        """Number of parameters: both embeddings, the norms, and the layers' matrices.

        Args:
            active: Of the experts, only those of one token.
        """
        mlps = (self.topk if active else self.experts) or 1
        mlp = mlps * 3 * self.hidden * self.ffn + self.experts * self.hidden
        matrices = 4 * self.hidden**2 + mlp
        norms = (2 * self.layers + 1) * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * matrices + norms

    def flops_per_token(self, *, causal: bool = True) -> float:
        """Return the model FLOPs per token of forward and backward, without recomputation.

        Args:
            causal: 6 (N - V h) + 6 L S h: the embedding is not a matmul, and causal attention is
                half of the square. Otherwise 6 N + 12 L S h, which counts both in full, as in
                llm-foundry's published table.
        """
        attention = self.layers * self.seq_length * self.hidden
        if causal:
            return (
                6.0 * (self.num_parameters(active=True) - self.vocab * self.hidden)
                + 6.0 * attention
            )
        return 6.0 * self.num_parameters(active=True) + 12.0 * attention


SHAPES: Final[Mapping[str, Shape]] = {
    # 36.1M parameters: a step takes about a second on two cores.
    "36m": Shape(
        layers=6, hidden=512, ffn=1408, heads=8, vocab=16384, seq_length=1024, micro_batch=2
    ),
    # 1.35B parameters, the shape of Sheared-LLaMA-1.3B (arXiv:2310.06694): heads 128 wide.
    "1.3b": Shape(
        layers=24, hidden=2048, ffn=5504, heads=16, vocab=32000, seq_length=2048, micro_batch=8
    ),
    # 42.1M of 174M parameters are active.
    "64-experts": Shape(
        layers=6, hidden=512, ffn=256, heads=8, vocab=16384, seq_length=1024, micro_batch=1,
        experts=64, topk=8,
    ),
    # Only for a test of all systems; their speed is not reported.
    "tiny": Shape(
        layers=2, hidden=64, ffn=176, heads=2, vocab=512, seq_length=64, micro_batch=2
    ),
    "tiny-experts": Shape(
        layers=2, hidden=64, ffn=32, heads=2, vocab=512, seq_length=64, micro_batch=2,
        experts=8, topk=2,
    ),
}  # fmt: skip


def batch(shape: Shape, step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return tokens and labels [B, S], the same for all systems and devices."""
    generator = torch.Generator().manual_seed(step)
    size = (shape.micro_batch, shape.seq_length + 1)
    ids = torch.randint(shape.vocab, size, generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def weights(shape: Shape) -> dict[str, Tensor]:
    """Return all parameters in float32, with our names.

    They are those of Megatron's local layer spec without biases, but that ours stacks experts.
    """
    generator = torch.Generator().manual_seed(1234)
    hidden = shape.hidden

    def normal(*size: int) -> Tensor:
        return torch.empty(size).normal_(0.0, 0.02, generator=generator)

    state = {"embedding.word_embeddings.weight": normal(shape.vocab, hidden)}
    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}"
        state |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attention.linear_qkv.weight": normal(3 * hidden, hidden),
            f"{prefix}.self_attention.linear_proj.weight": normal(hidden, hidden),
            f"{prefix}.pre_mlp_layernorm.weight": torch.ones(hidden),
        }
        if shape.experts:
            state |= {
                f"{prefix}.mlp.router.weight": normal(shape.experts, hidden),
                f"{prefix}.mlp.experts.fc1": normal(shape.experts, 2 * shape.ffn, hidden),
                f"{prefix}.mlp.experts.fc2": normal(shape.experts, hidden, shape.ffn),
            }
        else:
            state |= {
                f"{prefix}.mlp.linear_fc1.weight": normal(2 * shape.ffn, hidden),
                f"{prefix}.mlp.linear_fc2.weight": normal(hidden, shape.ffn),
            }
    state["decoder.final_layernorm.weight"] = torch.ones(hidden)
    state["output_layer.weight"] = normal(shape.vocab, hidden)
    return state
