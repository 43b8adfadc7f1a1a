"""Weights of linears that are stored in another form than their values, so that the full ones never
coexist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ascend_run.ops.tensor_marks import mark

if TYPE_CHECKING:
    from ascend_run.types.model import WeightStorage

_MARK = "ascend_stored"


class StoredWeight:
    """What is stored in place of a parameter that has no memory of its own.

    Args:
        owner: Name of the plugin that stores it.
        parameter: On torch's meta device: the shape and the dtype of this rank's shard.
        device: Where its values are needed.
    """

    def __init__(
        self, owner: str, storage: WeightStorage, parameter: Tensor, device: torch.device
    ) -> None:
        self.owner = owner
        self.packed: Mapping[str, Tensor] = {}
        self._storage, self._like, self._device = storage, parameter.detach(), device
        mark(parameter, **{_MARK: self})

    @contextmanager
    def filling(self) -> Iterator[Tensor]:
        """Give a tensor to fill with all values, which are packed afterwards."""
        values = torch.empty_like(self._like, device=self._device)
        yield values
        self.packed = self._storage.pack(values)

    def values(self) -> Tensor:
        """Return the values in the parameter's dtype."""
        return self._storage.unpack(self.packed, self._like)


def stored_weight(parameter: Tensor) -> StoredWeight | None:
    """Return what is stored in place of a parameter; None if it has values of its own."""
    return getattr(parameter, _MARK, None)


def held_tensors(parameter: Tensor) -> list[Tensor]:
    """Return the tensors that have the memory of a parameter: itself, or what is stored."""
    stored = stored_weight(parameter)
    return [parameter] if stored is None else [*stored.packed.values()]


@contextmanager
def filled(parameter: Tensor) -> Iterator[Tensor]:
    """Give the tensor in which all values of a parameter are to be set: itself, or of a stored
    weight another one, with the same attributes, that lives until they are packed."""
    stored = stored_weight(parameter)
    if stored is None:
        yield parameter
    else:
        with stored.filling() as values:
            mark(values, **vars(parameter))
            yield values


@contextmanager
def without_memory(*kinds: type[nn.Module]) -> Iterator[None]:
    """Register the parameters ``weight`` of these kinds of modules on torch's meta device, within
    the context: what they are created with is freed at once."""

    def on_meta(module: nn.Module, name: str, parameter: Tensor | None) -> Any:
        if parameter is None or name != "weight" or not isinstance(module, kinds):
            return None
        return nn.Parameter(parameter.to("meta"))

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def allocate(model: nn.Module, device: torch.device) -> None:
    """Move a model to its device; give the weights that were created without memory their own, but
    not those that are stored."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.is_meta and stored_weight(weight) is None:
            own = nn.Parameter(torch.empty_like(weight, device=device))
            mark(own, **vars(weight))
            module.register_parameter("weight", own)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
