"""Record every dropout mask of a forward: where it is drawn, how much it keeps, and a digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.model.attention import CoreAttention
from ascend_run.core.model.forward_chain import linked
from ascend_run.plugin_api import ForwardLink, LinkPlace
from ascend_run.plugin_api import contracts as c
from ascend_run.types.forward import Forward, NamedLink

from .mask_record import ATTENTION, HIDDEN, DropoutMask
from .moments import summary
from .taps import ROOT, in_backward, named_modules

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_DIGEST_BYTES: Final = 16
_EMBEDDING: Final = "embedding.embedding_dropout"


@attrs.frozen
class _Place:
    """A module whose forward runs."""

    name: str
    kind: str
    micro_batch: int


@contextmanager
def masks_recorded(
    bundle: c.ModelBundle, groups: ProcessGroupCollection
) -> Iterator[list[DropoutMask]]:
    """Record the masks that are drawn inside the block, in order."""
    mode = _Recorder()
    pp_rank = groups.pp.rank()
    links: dict[nn.Module, NamedLink] = {}
    for chunk in bundle.chunks:
        links |= mode.links(unwrapped(chunk), bundle.transformer_config, pp_rank)
    with linked(links), mode:
        yield mode.masks


class _Recorder(TorchDispatchMode):
    """Sees every operation that draws a mask, and the tensor that the mask is applied to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[DropoutMask] = []
        self._stack: list[_Place] = []
        self._calls: Counter[tuple[str, int]] = Counter()
        self._drawn: dict[int, tuple[Tensor, int]] = {}
        """Address -> a mask that was drawn as a factor (kept alive), and its index."""

    def links(
        self, model: nn.Module, config: TransformerConfig, pp_rank: int
    ) -> dict[nn.Module, NamedLink]:
        """Return links around the forward of every module of a chunk, outside of the run's own."""
        begun = [-1]
        links = {}
        for name, module in named_modules(model, config, pp_rank):
            kind = _kind(name, module)
            link = ForwardLink(wrap=partial(self._inside, name, kind, begun), compilable=True)
            links[module] = NamedLink(name="verify", place=LinkPlace.AROUND, link=link)
        return links

    def _inside(self, name: str, kind: str, begun: list[int], inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if name == ROOT and not in_backward():
                begun[0] += 1
            self._stack.append(_Place(name, kind, begun[0]))
            try:
                return inner(*args, **kwargs)
            finally:
                self._stack.pop()

        return forward

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._overloadpacket._qualified_op_name
        if name in ("aten::bernoulli_", "aten::bernoulli"):
            self._add(out, _mean(args[1] if len(args) > 1 else args[0]))
            self._drawn[out.data_ptr()] = out, len(self.masks) - 1
        elif name in ("aten::native_dropout", "aten::_fused_dropout"):
            keep = 1.0 - args[1] if name == "aten::native_dropout" else args[1]
            self._add(out[1], keep)
            self._applied(len(self.masks) - 1, args[0])
        elif name in ("aten::mul", "aten::mul_") and self._drawn:
            self._multiplied(*args[:2])
        return out

    def _multiplied(self, one: Any, two: Any) -> None:
        for mask, other in ((one, two), (two, one)):
            if isinstance(mask, Tensor) and isinstance(other, Tensor):
                found = self._drawn.pop(mask.data_ptr(), None)
                if found is not None:
                    self._applied(found[1], other)

    def _applied(self, index: int, dropped: Tensor) -> None:
        self.masks[index] = attrs.evolve(self.masks[index], dropped=summary(dropped))

    @property
    def _runs_forward(self) -> bool:
        """Whether a chunk runs as a whole, and not a part of it that is recomputed ahead."""
        return bool(self._stack) and self._stack[0].name == ROOT

    def _add(self, mask: Tensor, keep: float) -> None:
        place = self._stack[-1] if self._stack else _Place("", "", -1)
        kind = ATTENTION if any(p.kind == ATTENTION for p in self._stack) else place.kind
        key = (place.name, place.micro_batch)
        kept = mask != 0
        self.masks.append(
            DropoutMask(
                module=place.name,
                kind=kind,
                call=self._calls[key],
                micro_batch=place.micro_batch,
                is_redrawn=in_backward() or not self._runs_forward,
                keep=keep,
                kept=int(kept.sum()),
                size=mask.numel(),
                digest=_digest(kept),
            )
        )
        self._calls[key] += 1


def _kind(name: str, module: nn.Module) -> str:
    if isinstance(module, CoreAttention):
        return ATTENTION
    return HIDDEN if isinstance(module, TransformerLayer) or name == _EMBEDDING else ""


def _mean(keep: Any) -> float:
    return float(keep.double().mean()) if isinstance(keep, Tensor) else float(keep)


def _digest(kept: Tensor) -> str:
    flat = kept.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=_DIGEST_BYTES).hexdigest()
