"""Compare a plugin's model family with transformers, on tiny models of several configs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ascend_run.core.run import prepared_rank
from ascend_run.core.train.seeding import seed_everything
from ascend_run.plugin_api import ModelFamily
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.testing.models import samples
from ascend_run.testing.runtime import FamilyOutcome, Trial

from .comparing import against
from .reference import Reference, computes, random_model, reference_of, unknown_to_transformers
from .variants import VOCABULARY, options, sizes, with_accepted

Prepare = Callable[[Trial, int], PreparedRun]
_RUN: Final = {
    "model.make_vocab_size_divisible_by": 8,
    "model.moe_aux_loss_coeff": 0.0,
    "data.seq_length": 16,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "train.precision": "fp32",
}


def against_transformers(plugin: type[Any], folder: Path, prepare: Prepare) -> FamilyOutcome:
    """Compare logits, gradients, weights and config of random models, first with small sizes only,
    then with other options away from their defaults as well.

    Args:
        prepare: Plans a trial on a number of ranks.
    """
    family: ModelFamily = plugin().ascend_model_family()
    if reason := unknown_to_transformers(family.model_type, family.architecture):
        return FamilyOutcome(not_compared=reason)
    small = sizes(family)
    moved = with_accepted(small, options(family), partial(_is_accepted, family))
    problems: list[str] = []
    for label, values in (("tiny", small), ("with options away from their defaults", moved)):
        found = _compared(family, values, folder / label, prepare)
        problems += (f"{label}: {problem}" for problem in found)
    names = {name for name, value in moved.items() if small.get(name, value) != value}
    names |= moved.keys() - small.keys()
    return FamilyOutcome(problems=tuple(problems), moved=tuple(sorted(names)))


def _is_accepted(family: ModelFamily, values: Mapping[str, Any]) -> bool:
    """Whether both the family and transformers have models with this config."""
    try:
        model = random_model(family.model_type, values)
        written = json.loads(model.config.to_json_string())
        config_from_hf(family, {**written, "architectures": [family.architecture]})
        computes(model)
    except Exception:  # transformers raises whatever its classes raise
        return False
    return True


def _compared(
    family: ModelFamily, values: Mapping[str, Any], folder: Path, prepare: Prepare
) -> Iterator[str]:
    data = samples({"model.vocab_size": VOCABULARY, "data.seq_length": 16}, 4)
    for sample in data:
        # Megatron scales gradients by 1 / tokens in float32: exact for a power of two.
        sample["loss_mask"].fill_(1.0)
    reference = reference_of(random_model(family.model_type, values), folder, data)
    yield from _problems(family, reference, data, prepare)


def _problems(
    family: ModelFamily, reference: Reference, data: list[Any], prepare: Prepare
) -> Iterator[str]:
    config = {**_RUN, "model.family": family.model_type, "model.hf_path": str(reference.folder)}
    try:
        prepared = prepare(Trial(config=config), 1)
    except AscendRunError as error:
        reasons = error.problems or (error.headline,)
        yield from (f"the folder that transformers writes is rejected: {why}" for why in reasons)
        return
    with prepared_rank(prepared.run_request()) as (hooks, context):
        seed_everything(context.config, context.layout)
        yield from against(reference, hooks, context, data)
