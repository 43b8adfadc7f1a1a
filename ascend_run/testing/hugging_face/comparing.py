"""Compare a family's model with transformers: logits, loss, gradients, weights and config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.models import load_model
from ascend_run.core.hugging_face.parameter_rows import parameter_sources, row_runs, stored_shapes
from ascend_run.plugin_api import ModelFamily, RunConfig
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from ascend_run.testing.dry_run import DryRun, gradient_of
from ascend_run.testing.parameter_shards import parameter_shards
from ascend_run.testing.runtime import Shard
from ascend_run.testing.tensors import assemble, relative_error

from .reference import Reference

TOLERANCE: Final = 1e-8
"""float64, max|a-b| / max|b| of each tensor. Some models of transformers have constants of nine
digits (the GELU of BLOOM: 3e-10)."""
INPUTS: Final = ("tokens", "position_ids")


def against(
    reference: Reference, hooks: Hooks, context: c.RunContext, samples: list[dict[str, Tensor]]
) -> Iterator[str]:
    """Yield what differs between a run that starts from the reference's folder and transformers.

    Args:
        context: Of a run with ``model.hf_path``, without models yet.
        samples: Those of the reference; one global batch.
    """
    dry_run = DryRun(hooks, context)
    forward_backward = dry_run.for_gradients(torch.float64)
    family: ModelFamily = hooks.require("ascend_model_family")
    try:
        dry_run.load_weights()
    except AscendRunError as error:
        yield from (f"its weights cannot be read: {problem}" for problem in error.problems)
        return
    config = context.config
    yield from _other_config(family, config, reference)
    yield from _other_stored(family, config, dry_run, reference.folder)
    yield from _other_logits(dry_run, reference, samples)
    loss = dry_run.gradients(forward_backward, dry_run.batches(samples)).loss
    if (off := abs(loss / reference.loss - 1)) > TOLERANCE:
        yield f"the loss has relative error {off:.2e} to that of transformers"
    yield from _other_gradients(family, dry_run, reference)


def _other_config(family: ModelFamily, config: RunConfig, reference: Reference) -> Iterator[str]:
    """What transformers reads differently in the config that is written back."""
    from transformers import AutoConfig

    try:
        written: dict[str, Any] = config_to_hf(family, config)
    except AscendRunError as error:
        yield from (f"its config cannot be written: {problem}" for problem in error.problems)
        return
    again = AutoConfig.for_model(**written).to_dict()
    for name in sorted(reference.config.keys() - family.ignored):
        if (value := again.get(name)) != (wanted := reference.config[name]):
            yield f"'{name}' of its config is written as {value!r}, expected {wanted!r}"


def _other_stored(
    family: ModelFamily, config: RunConfig, dry_run: DryRun, folder: Path
) -> Iterator[str]:
    """Stored tensors that parameters which were read from them do not give back, bit for bit."""
    parameters, written = _full(dry_run, Tensor.detach), dict[str, Tensor]()
    for name, source in parameter_sources(family, config).items():
        tensor = parameters[name].double()
        runs = row_runs(source, tensor.shape, config)
        for stored_name, shape in stored_shapes(runs, tensor.shape).items():
            written[stored_name] = torch.full(shape, torch.nan, dtype=torch.float64)
        for run in runs:
            matrix = tensor if run.expert is None else tensor[run.expert]
            target = written[run.hf] if run.hf_expert is None else written[run.hf][run.hf_expert]
            target = target.t() if run.transposed else target
            target[run.stored(run.start, run.start + run.rows)] = matrix[
                run.start : run.start + run.rows
            ]
    for file in sorted(folder.glob("*.safetensors")):
        for name, want in load_file(file).items():
            if name in written and not torch.equal(written[name], want.double()):
                yield f"'{name}' is not written as it was read"


def _full(dry_run: DryRun, read: Callable[[Tensor], Tensor | None]) -> Mapping[str, Tensor]:
    """Return what ``read`` returns for each parameter and buffer, by name."""
    vocab_size = dry_run.context.config.model.vocab_size
    found = parameter_shards(dry_run.bundle.chunks, vocab_size, read)
    shards = [
        Shard(name=x.name, tensor=x.tensor, offset=x.offset, global_shape=x.global_shape)
        for x in found
    ]
    return assemble([shards]).tensors


def _other_logits(
    dry_run: DryRun, reference: Reference, samples: list[dict[str, Tensor]]
) -> Iterator[str]:
    (model,) = dry_run.bundle.chunks
    device = dry_run.context.device.torch_device
    given = (torch.stack([sample[name] for sample in samples]) for name in INPUTS)
    with torch.no_grad():
        logits = model(*(tensor.to(device) for tensor in given)).cpu()
    error = relative_error(logits[..., : reference.logits.shape[-1]], reference.logits)
    if error > TOLERANCE:
        yield f"the logits have max error {error:.2e} relative to the largest of transformers"


def _other_gradients(family: ModelFamily, dry_run: DryRun, reference: Reference) -> Iterator[str]:
    """Gradients that differ from transformers', which are read like weights."""
    trained = {shard.name for shard in dry_run.shards(Tensor.detach)}
    found = _full(dry_run, gradient_of)
    load_model(reference.gradients, family, dry_run.context.config, dry_run.bundle)
    for name, expected in _full(dry_run, Tensor.detach).items():
        if name not in trained or (not expected.any() and name not in found):
            continue
        if name not in found:
            yield f"{name} gets no gradient"
        elif (error := relative_error(found[name], expected)) > TOLERANCE:
            yield (
                f"the gradient of {name} has max error {error:.2e} relative to the largest element "
                "of transformers'"
            )
