"""The oracle as one more reference of the plain run. Imports no torch until it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.registry.kinds import Kind, kind_of
from ascend_run.testing.oracle.known import ALIBI_FAMILIES, bytes_needed, unknown
from ascend_run.types.config import RunConfig

from .questions import Side

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.testing.oracle.training import Gradients, Step
    from ascend_run.tools.verify.capture.moments import Moments
    from ascend_run.tools.verify.capture.record import Record, RecordedShard
    from ascend_run.tools.verify.compare.comparison import Comparison

ORACLE: Final = "the oracle"
_MOST_BYTES: Final = 8 * 2**30
_AXES: Final = ("tp", "pp", "cp", "dp", "ep", "expt_tp")


def what_the_oracle_lacks(prepared: PreparedRun) -> tuple[str, ...]:
    """Return by name why the oracle cannot compute a plain run; empty if it can."""
    found = [f"it has no formula for {what}" for what in unknown(prepared.config)]
    for plugin in prepared.resolution.order:
        if kind_of(plugin) is Kind.MODEL:
            name = plugin.manifest.name
            usual = {"ascend_model_family"}
            usual |= {"ascend_position_bias"} if name in ALIBI_FAMILIES else set()
            hooks = sorted(implementations(plugin).keys() - usual)
            found += [f"it has no formula for {hook} of the family {name}" for hook in hooks]
    if not found and (needed := bytes_needed(prepared.config)) > _MOST_BYTES:
        found.append(
            f"it keeps every score in float64, about {needed / 2**30:.0f} GiB here; shrink the "
            "model (model.num_layers=2) or data.seq_length"
        )
    return tuple(found)


def oracle_record(prepared: PreparedRun, plain: Record, steps: int) -> Record:
    """Compute with the oracle what a plain run computes, from its weights and samples.

    Raises:
        KeyError: The run has other parameters than its formulas.
    """
    from ascend_run.testing.oracle import training
    from ascend_run.tools.verify.compare.full_tensors import assemble

    config = _with_end_of_document(prepared.config)
    weights = assemble([plain], lambda record: record.initial, trained=False).tensors
    given = {**weights, **plain.expert_biases}
    return _record(
        weights,
        training.gradients(config, given, plain.first_samples),
        [*training.steps(config, given, plain.samples, steps)],
    )


def compared_with_oracle(
    plain: Side, records: list[Record], oracle: list[Record]
) -> tuple[Side, Comparison]:
    """Compare a plain run with its oracle."""
    from ascend_run.tools.verify.compare.comparison import compare

    comparison = compare(records, oracle, against=ORACLE, same_weights=True)
    return attrs.evolve(plain, name=ORACLE), comparison


def _with_end_of_document(config: RunConfig) -> RunConfig:
    """Set the token that ends a document, which else comes from the tokenizer or the data."""
    options = config.plugins.get("eod-reset")
    if options is None or not options.eod_token_id is options.document_length is None:
        return config
    from ascend_run.text.end_of_document import end_of_document

    token = end_of_document(config, config.data.train)
    given = {**config.plugins, "eod-reset": attrs.evolve(options, eod_token_id=token)}
    return attrs.evolve(config, plugins=given)


def _record(weights: Mapping[str, Tensor], first: Gradients, steps: list[Step]) -> Record:
    """Return the oracle's results as the record of a rank that holds the full model."""
    from ascend_run.tools.verify.capture.record import Record

    trained = steps[0].weight_decays
    return Record(
        rank=0,
        coordinates=dict.fromkeys(_AXES, 0),
        sizes=dict.fromkeys(_AXES, 1),
        places=[*_places(weights, trained)],
        gradients=[first.gradients.get(name) for name in weights],
        loss=first.loss,
        num_tokens=first.tokens,
        micro_batches=first.micro_batches,
        weights=[[step.weights[name].float() for name in weights] for step in steps],
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        step_tokens=[step.tokens for step in steps],
        step_gradients=[[*_projections(weights, step)] for step in steps],
        rates={
            name: [decay, *(step.learning_rate for step in steps)]
            for name, decay in trained.items()
        },
        forward={0: _moments(first.trace.forward)},
        backward={0: _moments(first.trace.backward)},
    )


def _projections(weights: Mapping[str, Tensor], step: Step) -> Iterator[list[float] | None]:
    from ascend_run.tools.verify.capture.projections import projections

    for name, weight in weights.items():
        found = step.gradients.get(name)
        origin = (0,) * weight.ndim
        yield None if found is None else projections(found, origin, weight.shape)


def _places(weights: Mapping[str, Tensor], trained: Mapping[str, float]) -> Iterator[RecordedShard]:
    from ascend_run.tools.verify.capture.record import RecordedShard

    for name, weight in weights.items():
        yield RecordedShard(
            name=name,
            offset=(0,) * weight.ndim,
            global_shape=tuple(weight.shape),
            trains=name in trained,
        )


def _moments(rows: Mapping[str, dict[int, Any]]) -> dict[str, Moments]:
    from ascend_run.tools.verify.capture.moments import Moments

    return {key: Moments(rows=of_key) for key, of_key in rows.items()}
