"""transformers as the second oracle, of a run's model family.

The oracle reads the run's config. transformers reads the config.json and the tensors that the run's
model is exported as, so it shows whether the family means by them what Hugging Face does: keys,
defaults, names of tensors, orders of rows.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import AscendRunError, ConfigError
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.testing.hugging_face.reference import unknown_to_transformers
from ascend_run.testing.oracle import training
from ascend_run.testing.tensors import relative_error
from ascend_run.tools.convert.model_config import load_family
from ascend_run.types.config import FieldSection, RunConfig

from .capture.record import Record
from .compare.full_tensors import assemble
from .compare.readings import shortened
from .compare.thresholds import FAMILY, FLOAT64_EPS, QUIET
from .compare.verdict import Check, Fault, Outcome, Phase, Verdict

TRANSFORMERS: Final = "transformers"
_CHANGED: Final = ("alibi", "noop-layers")
"""Features by which a run's model differs from its family's."""
_ADDED: Final = re.compile(r"\.adapter\.|^mtp\.")
"""In the names of parameters that are none of the family's model."""
_OWN_LOSSES: Final = {
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
}
"""Fields of losses that transformers does not add, or adds in another form."""
_OF_OLD_LENGTHS: Final = ("phimoe",)
"""Families whose class in transformers takes the short factors of longrope at every length."""


@attrs.frozen(kw_only=True)
class FamilyComparison:
    """The model of a family against transformers."""

    checks: tuple[Check, ...]
    fault: Fault | None = None
    note: str = ""
    """Why nothing was compared; empty if something was."""

    def added_to(self, verdict: Verdict) -> Verdict:
        """Return the verdict on a run with the family's; the run's own fault is located better."""
        is_wrong = not all(check.passed for check in self.checks)
        return attrs.evolve(
            verdict,
            outcome=Outcome.DIVERGES if is_wrong else verdict.outcome,
            fault=verdict.fault or self.fault,
            checks=(*verdict.checks, *self.checks),
            references=(*verdict.references, *([] if self.note else [TRANSFORMERS])),
            notes=(*verdict.notes, *([self.note] if self.note else [])),
        )


def compare_with_transformers(prepared: PreparedRun, plain: Record) -> FamilyComparison:
    """Compare loss and every gradient of one micro-batch of a run's model, from its weights.

    The model is the family's alone: adapters, documents and losses of Megatron are left out. Its
    numbers are the oracle's, with which the run itself is compared.

    Args:
        prepared: Of a run that the oracle has formulas for.
        plain: Its record on one rank, with its samples.
    """
    family = load_family(prepared.config.model.family)
    config = _of_family(prepared.config)
    if lacking := what_transformers_lacks(prepared.config, family):
        check = Check(name="gradients", against=TRANSFORMERS, passed=True, applies=False)
        return FamilyComparison(checks=(check,), note=f"not compared with transformers: {lacking}")
    from .in_transformers import gradients_of

    weights = assemble([plain], lambda record: record.initial, trained=False).tensors
    weights = {name: weight for name, weight in weights.items() if not _ADDED.search(name)}
    rows = _one_micro_batch(plain.first_samples, config.train.micro_batch_size)
    samples = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    ours = training.gradients(config, weights, samples)
    with tempfile.TemporaryDirectory() as folder:
        try:
            loss, theirs = gradients_of(Path(folder), family, config, weights, rows)
        except AscendRunError as error:
            return _not_readable(family, error)
    return _compared(family, ours, loss, theirs)


def what_transformers_lacks(config: RunConfig, family: ModelFamily) -> str:
    """Return why transformers cannot compute a run's model; empty if it can."""
    if found := [name for name in _CHANGED if name in config.enable]:
        return f"it has no {found[0]}"
    if reason := unknown_to_transformers(family.model_type, family.architecture):
        return reason
    is_longrope = config.model.rope_scaling_type == "longrope"
    if is_longrope and family.model_type in _OF_OLD_LENGTHS:
        return f"its {family.architecture} takes longrope's short factors at every length"
    try:
        config_to_hf(family, _of_family(config))
    except ConfigError as error:
        return f"{error.headline}: {error.problems[0]}"
    return ""


def _of_family(config: RunConfig) -> RunConfig:
    """Return the config of the family's model alone."""
    model = {**config.model, **_OWN_LOSSES}
    return attrs.evolve(config, model=FieldSection(model), enable=(), task="pretrain")


def _one_micro_batch(samples: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Return the first samples, from one that trains a token on, with plain positions."""
    trained = samples["loss_mask"].any(dim=1).nonzero().flatten().tolist()
    places = torch.arange(samples["tokens"].shape[1])
    first = trained[0] if trained else 0
    rows = [
        {name: field[row] for name, field in samples.items()}
        for row in range(len(samples["tokens"]))
    ]
    return [{**row, "position_ids": places} for row in rows[first : first + count]]


def _not_readable(family: ModelFamily, error: AscendRunError) -> FamilyComparison:
    details = error.problems or (error.headline,)
    check = Check(
        name="weights",
        against=TRANSFORMERS,
        passed=False,
        worst=math.inf,
        where=details[0],
        details=shortened(details),
    )
    return FamilyComparison(checks=(check,), fault=_fault(family, Phase.FORWARD, error.headline))


def _compared(
    family: ModelFamily, ours: training.Gradients, loss: float, theirs: Mapping[str, Tensor]
) -> FamilyComparison:
    quiet = QUIET * max(float(x.abs().max()) for x in theirs.values())
    errors = {
        name: math.inf if got is None else relative_error(got, theirs[name], quiet)
        for name, got in ours.gradients.items()
    }
    in_order = sorted(errors, key=errors.__getitem__, reverse=True)
    wrong = [name for name in in_order if not errors[name] <= FAMILY]
    of_loss = _check("loss", abs(ours.loss / loss - 1), "", [f"{ours.loss!r}, expected {loss!r}"])
    of_gradients = _check(
        "gradients",
        errors[in_order[0]],
        in_order[0],
        [f"{name} is wrong by {errors[name]:.1e} of the largest value" for name in wrong],
    )
    fault = None
    if not of_loss.passed:
        why = "transformers computes another loss from the exported model"
        fault = _fault(family, Phase.FORWARD, why)
    elif wrong:
        why = f"the loss is transformers', but the gradient of {wrong[0]} is not"
        fault = _fault(family, Phase.BACKWARD, why)
    return FamilyComparison(checks=(of_loss, of_gradients), fault=fault)


def _check(name: str, error: float, where: str, problems: Sequence[str]) -> Check:
    passed = error <= FAMILY
    return Check(
        name=name,
        against=TRANSFORMERS,
        passed=passed,
        worst=error,
        eps=error / FLOAT64_EPS,
        tolerance=FAMILY,
        where=where,
        details=() if passed else shortened(problems),
    )


def _fault(family: ModelFamily, phase: Phase, why: str) -> Fault:
    return Fault(phase=phase, module=f"family {family.model_type}", why=why, in_all_runs=True)
