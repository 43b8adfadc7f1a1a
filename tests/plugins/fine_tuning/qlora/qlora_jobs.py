"""Jobs of a pool's rank: a quantised base, and a plain one that has its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import bitsandbytes.functional as peer
import torch
from torch import Tensor, nn

from ascend_run.ops.linear.stored_weight import StoredWeight, held_tensors, stored_weight
from ascend_run.plugin_api import Manifest, Numerics, hookimpl
from benchmarks.live_storages import LiveStorages
from tests.support.small_runs import Training, Values, standing_rank


def packed_by_peer(weight: Tensor, block: int, compressed: bool) -> dict[str, Tensor]:
    """Return what bitsandbytes stores of a weight, by the names of its ``QuantState``."""
    with torch.compiler.set_stance("force_eager"):  # it would compile some operations
        codes, state = peer.quantize_4bit(
            weight.float() if weight.dtype is torch.float64 else weight.contiguous(),
            blocksize=block,
            quant_type="nf4",
            compress_statistics=compressed,
        )
    packed = {"weight": codes.view(-1), "absmax": state.absmax}
    if compressed:
        packed |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
    return packed


def values_by_peer(weight: Tensor, block: int, compressed: bool) -> Tensor:
    """Return a weight as bitsandbytes quantises and dequantises it.

    Flat, as its AVX-512 kernel takes scales of other blocks for rows that end within a block.
    """
    with torch.compiler.set_stance("force_eager"):
        codes, state = peer.quantize_4bit(
            weight.float() if weight.dtype is torch.float64 else weight.contiguous(),
            blocksize=block,
            quant_type="nf4",
            compress_statistics=compressed,
        )
        state.shape = torch.Size([weight.numel()])
        return peer.dequantize_4bit(codes, state).view(weight.shape).to(weight.dtype)


class DequantisedByPeer:
    """Give every linear of the layers the values that bitsandbytes makes of its initial ones."""

    manifest = Manifest(
        name="dequantised-by-peer",
        summary="weights as bitsandbytes dequantises them",
        numerics=Numerics.MODEL,
    )
    config_class = None

    def __init__(self, block: int, compressed: bool) -> None:
        self._block, self._compressed = block, compressed

    @hookimpl
    def ascend_linear(self) -> Any:
        @torch.no_grad()
        def replace(linear: Any) -> Any:
            linear.weight.copy_(values_by_peer(linear.weight, self._block, self._compressed))
            return linear

        return replace


@attrs.frozen
class Steps:
    """What one rank computed."""

    losses: Sequence[float]
    gradients: Sequence[Mapping[str, Tensor]]
    """Of each step, by names in the model; of a distributed optimizer, before they are reduced."""
    trained: Mapping[str, Tensor]
    """Afterwards."""
    packed: Mapping[str, Mapping[str, Tensor]]


def train(
    values: Values, enable: Sequence[str], num_steps: int, peers: tuple[int, bool] | None = None
) -> Steps:
    """Take steps on the one batch of the kit.

    Args:
        peers: Block and double quantisation of ``DequantisedByPeer``; None leaves it out.
    """
    more = () if peers is None else (DequantisedByPeer(*peers),)
    with standing_rank(values, enable, *more) as (hooks, context):
        run = Training(values, hooks, context)
        losses: list[float] = []
        gradients: list[dict[str, Tensor]] = []
        for _ in range(num_steps):
            losses.append(run.step().loss)
            gradients.append(_gradients(run.bundle.chunks))
        named = [pair for chunk in run.bundle.chunks for pair in named_in(chunk)]
        return Steps(
            losses,
            gradients,
            {name: p.detach().clone() for name, p in named if p.requires_grad},
            {name: {**one.packed} for name, one in stored_in(run.bundle.chunks)},
        )


def computed(values: Values, enable: Sequence[str], weight: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradient of a linear of the first layer, whose new adapter adds zero, and
    those of bitsandbytes' linear with bfloat16 as its compute dtype.

    Args:
        weight: Its initial values, before they are quantised.
    """
    import bitsandbytes

    from ascend_run.core.model.build import build_model

    theirs = bitsandbytes.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias=False, compute_dtype=torch.bfloat16
    )
    theirs.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    with torch.compiler.set_stance("force_eager"):
        theirs.to("cpu")
    torch.manual_seed(0)
    x_SBK = torch.randn(5, 1, weight.shape[1], dtype=weight.dtype)
    dout_SBN = torch.randn(5, 1, weight.shape[0], dtype=weight.dtype)
    with standing_rank(values, enable) as (hooks, context):
        bundle = build_model(context.config, hooks, context.groups, context.device)
        ours: Any = bundle.chunks[0].decoder.layers[0].mlp.linear_fc2
        found: list[Tensor] = []
        for compute in (lambda x: ours(x)[0], theirs):
            given = x_SBK.clone().requires_grad_()
            out = compute(given)
            out.backward(dout_SBN)
            assert given.grad is not None
            found += [out.detach(), given.grad]
        return tuple(found)


def initial_shards(values: Values) -> dict[str, Tensor]:
    """Return this rank's initial weights of a plain model."""
    from ascend_run.core.model.build import build_model

    with standing_rank(values) as (hooks, context):
        bundle = build_model(context.config, hooks, context.groups, context.device)
        return {name: p.detach().clone() for chunk in bundle.chunks for name, p in named_in(chunk)}


def named_in(chunk: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a chunk by global names, without those of data parallelism."""
    from ascend_run.core.checkpoint.regions import unwrapped
    from ascend_run.core.model.initialization import named_parameters

    return [*named_parameters(unwrapped(chunk))]


def stored_in(chunks: Sequence[nn.Module]) -> list[tuple[str, StoredWeight]]:
    """Return the stored weights of a model by global names."""
    named = [pair for chunk in chunks for pair in named_in(chunk)]
    found = [(name, stored_weight(parameter)) for name, parameter in named]
    return [(name, stored) for name, stored in found if stored is not None]


def _gradients(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    found = {}
    for chunk in chunks:
        for name, parameter in named_in(chunk):
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                found[name] = gradient.detach().clone()
    return found


def loaded_values(values: Values, enable: Sequence[str]) -> dict[str, Tensor]:
    """Return the dequantised weights of this rank after loading ``model.hf_path``."""
    with loaded_model(values, enable) as chunks:
        return {name: stored.values() for name, stored in stored_in(chunks)}


@contextmanager
def loaded_model(values: Values, enable: Sequence[str]) -> Iterator[Sequence[nn.Module]]:
    """Build and load a model of one rank."""
    from ascend_run.core.hugging_face.models import load_model
    from ascend_run.core.model.build import build_model

    with standing_rank(values, enable) as (hooks, context):
        config = context.config
        bundle = build_model(config, hooks, context.groups, context.device)
        load_model(config.model.hf_path, hooks.require("ascend_model_family"), config, bundle)
        yield bundle.chunks


@attrs.frozen
class Bytes:
    """Of one rank's model, on storages."""

    peak: int
    """While it was built and loaded."""
    held: int
    """Afterwards, of all parameters."""
    quantised: int
    """Of those, of linears."""
    in_bf16: int
    """Of these, in bf16."""
    largest: int
    """Of the largest one, in the run's dtype."""


class InMemory(LiveStorages):
    """Does not count what has no memory."""

    def _see(self, tensor: Tensor, *, in_file: bool) -> None:
        if not tensor.is_meta:
            super()._see(tensor, in_file=in_file)


def loading_bytes(values: Values, enable: Sequence[str]) -> Bytes:
    """Follow all storages while a model is built and loaded."""
    live = InMemory([])
    with live, loaded_model(values, enable) as chunks:
        peak = live.peak
        parameters = [p for chunk in chunks for _, p in named_in(chunk)]
        stored = [one for one in map(stored_weight, parameters) if one is not None]
        quantised = [parameter for parameter in parameters if stored_weight(parameter)]
        return Bytes(
            peak=peak,
            held=storage_bytes(held for p in parameters for held in held_tensors(p)),
            quantised=storage_bytes(held for one in stored for held in one.packed.values()),
            in_bf16=2 * sum(parameter.numel() for parameter in quantised),
            largest=max(parameter.nbytes for parameter in quantised or parameters),
        )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
