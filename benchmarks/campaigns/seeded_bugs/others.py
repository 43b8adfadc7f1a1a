"""Swapped activations and adapters."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, FORWARD, OPTIMIZER, Bug

_SWAPPER = "ascend_run.ops.swapping.swapper"
_ADAPTER = "ascend_run.plugins.fine_tuning.lora.adapter"
_SMALL = {"plugins.swap-attention.min_bytes": 1}
_ADAPTERS = r".*(adapter|lora|linear_qkv|linear_proj|linear_fc1|linear_fc2).*"

BUGS: Final = (
    Bug(
        name="swap-brings-zeros",
        what="what is brought back from the host is a buffer that nothing was copied to",
        target=f"{_SWAPPER}:Swapper.bring_back",
        old="self.copier.to_device(host, out)",
        new="out.zero_()",
        plugins=("swap-attention",),
        config=_SMALL,
        modules=r"decoder\.layers\.\d+\..*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="swap-mixes-layers",
        what="a tensor of another forward is taken for one with the same address",
        target=f"{_SWAPPER}:Swapper.bring_back",
        old="out = torch.empty(host.shape, dtype=host.dtype, device=self._device)",
        new="out = torch.empty_like(host); host = host.roll(8)",
        plugins=("swap-attention",),
        config=_SMALL,
        modules=r"decoder\.layers\.\d+\..*",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="recomputed-without-gradient",
        what="the first layer's MLP, adapters too, is recomputed from an input that is cut off",
        target="ascend_run.plugins.memory:repeated_later",
        old="checkpoint(run, False, hidden_states)",
        new="checkpoint(run, False, hidden_states.detach())",
        plugins=("lora", "swap-attention"),
        config={
            "plugins.lora.export": False,
            "plugins.lora.target_modules": ("linear_fc1", "linear_fc2"),
            "plugins.swap-attention.recompute_mlp_layers": 1,
        },
        modules=r"decoder\.layers\.0\.mlp(\..*)?|embedding(\.word_embeddings)?",
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-does-not-train",
        what="what the adapters add is cut off from the graph",
        target=f"{_ADAPTER}:attach",
        old="out + adapter(x) if",
        new="out + adapter(x).detach() if",
        plugins=("lora",),
        modules=_ADAPTERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-not-reduced",
        what="a row-parallel linear's adapter adds a rank's part for the whole",
        target=f"{_ADAPTER}:Adapter._exchanged",
        old="out = reduce_from_tensor_model_parallel_region(inner, group=group)",
        new="out = inner",
        plugins=("lora",),
        layout={"tp": 2},
        modules=_ADAPTERS,
        phases=(FORWARD, BACKWARD),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-whole-part-not-reduced",
        what="the gradient of what every rank holds whole is not summed over their tokens",
        target=f"{_ADAPTER}:Adapter.__init__",
        old="mark(parameter, sequence_parallel=self.sequence_parallel)",
        new="mark(parameter, sequence_parallel=False)",
        plugins=("lora",),
        layout={"tp": 2, "sp": 1},
        modules=_ADAPTERS,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-drawn-by-rank",
        what="every rank draws the adapters of a row-parallel linear as if it were the first",
        target=f"{_ADAPTER}:Adapter.initialize",
        old="drawn.chunk(size, dim=1)[rank]",
        new="drawn.chunk(size, dim=1)[0]",
        plugins=("lora",),
        layout={"tp": 2, "sp": 1},
        modules=_ADAPTERS,
        phases=(FORWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-base-moves",
        what="the base is not frozen",
        target="ascend_run.plugins.fine_tuning.lora.freezing:freeze",
        old="parameter.requires_grad_(is_added or is_saved(name, modules))",
        new="pass",
        plugins=("lora",),
        modules=r"optimizer|gradient norm",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
)
