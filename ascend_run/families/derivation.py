"""A family from another: only what differs is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def derived(
    base: ModelFamily,
    *,
    model_type: str,
    architecture: str,
    defaults: Mapping[str, object] = _NOTHING,
    keys: Iterable[ConfigKey] = (),
    key_defaults: Mapping[str, object] = _NOTHING,
    fixed: Mapping[str, object] = _NOTHING,
    ignored: Iterable[str] = (),
    without: Iterable[str] = (),
    names: Mapping[str, str] = _NOTHING,
    buffers: tuple[str, ...] = (),
    tensors: Iterable[TensorMap] = (),
    **own: Any,
) -> ModelFamily:
    """Return a family that differs from ``base`` in what is given.

    Each key of config.json is in one of ``keys``, ``fixed`` and ``ignored``; naming it here removes
    it from the base's.

    Args:
        model_type, architecture: Hugging Face's, as in ModelFamily.
        defaults: Config values that differ from the base's.
        keys: Keys of config.json that the base lacks or converts differently.
        key_defaults: Defaults of the base's keys that differ, by name.
        fixed, ignored: As in ModelFamily.
        without: Keys of config.json that the family does not have, and Megatron's parameters, by
            prefix within a layer (``mlp.``).
        buffers: As in ModelFamily.
        names: Parts of stored names -> what they are in this family, replaced in this order.
        tensors: Tensors that the base lacks or stores differently; replace those of one name.
        own: Other fields of ModelFamily.

    Raises:
        ValueError: ``key_defaults`` names a key that the base does not have.
    """
    keys, without = tuple(keys), tuple(without)
    if unknown := {*key_defaults} - {key.hf for key in base.keys}:
        raise ValueError(f"{model_type}: the base has no keys {sorted(unknown)}")
    named = {*(key.hf for key in keys), *fixed, *ignored, *without}
    kept = [key for key in base.keys if key.hf not in named]
    return attrs.evolve(
        base,
        model_type=model_type,
        architecture=architecture,
        defaults={**base.defaults, **defaults},
        keys=(
            *(attrs.evolve(k, default=key_defaults.get(k.hf, k.default)) for k in kept),
            *keys,
        ),
        fixed={**{hf: value for hf, value in base.fixed.items() if hf not in named}, **fixed},
        ignored=(base.ignored - named) | {*ignored},
        buffers=(*base.buffers, *buffers),
        tensors=(*_tensors(base, tuple(tensors), without, names),),
        **own,
    )


def _tensors(
    base: ModelFamily,
    changed: tuple[TensorMap, ...],
    without: tuple[str, ...],
    names: Mapping[str, str],
) -> Iterator[TensorMap]:
    replaced = {tensor.megatron for tensor in changed}
    for tensor in base.tensors:
        in_layer = tensor.megatron.removeprefix("decoder.layers.{layer}.")
        if tensor.megatron not in replaced and not in_layer.startswith(without):
            yield _renamed(tensor, names)
    for tensor in changed:
        yield _renamed(tensor, names)


def _renamed(tensor: TensorMap, names: Mapping[str, str]) -> TensorMap:
    stored = list(tensor.hf)
    for theirs, own in names.items():
        stored = [name.replace(theirs, own) for name in stored]
    return attrs.evolve(tensor, hf=tuple(stored))
