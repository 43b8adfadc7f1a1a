"""Compare run A with some of the choices of run B with run A itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_run.plugin_api import AscendRunError
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.verify.ranks import NoVerdict, Ranks

from .choices import Choice, Compared, State
from .comparing import first_step, reason_of, versions
from .mixing import Mixing

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.compare.comparison import Comparison

_SHOWN_PARAMETERS = 3


class RunComparer:
    """Compares mixed runs with run A, which is executed once.

    Args:
        ranks: Executes the runs.
    """

    def __init__(self, mixing: Mixing, ranks: Ranks) -> None:
        self._mixing, self._ranks = mixing, ranks
        self._exact = not mixing.tolerant
        self._recorded: list[Record] | None = None

    @property
    def choices(self) -> Sequence[Choice]:
        return self._mixing.choices

    def with_needed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these choices, and those without which they cannot run."""
        return self._mixing.with_needed(names)

    def __call__(self, names: Sequence[str]) -> Compared:
        """Compare run A with these choices.

        A mixed run that fails, unlike A and B, is one that cannot run.

        Raises:
            ConfigError: The runs have different parameters.
            NoVerdict: Run A or run B failed.
        """
        changes = self.with_needed(names)
        side = self._mixing.side(changes)
        expected = self._reference()
        try:
            side.prepare()
            records = self._ranks(side)
        except AscendRunError as error:
            if isinstance(error, NoVerdict) and len(changes) in (0, len(self.choices)):
                raise
            return Compared(changes=changes, state=State.CANNOT_RUN, why=reason_of(error))
        if others := _other_parameters(records, expected):
            if len(changes) == len(self.choices):
                raise _cannot_compare(others, self.choices)
            where = "initial weights (forward)"
            return Compared(
                changes=changes, state=State.DIVERGES, where=where, step=1, why=others[0]
            )
        return _compared(changes, self._compare(records, expected))

    def identity(self) -> dict[str, object]:
        """Return what the results depend on, as JSON values."""
        mixing = self._mixing
        everything = [choice.name for choice in mixing.choices]
        return {
            "runs": [mixing.side(names).as_request() for names in ((), everything)],
            "versions": versions(),
            "plugins": [prepared.lock for prepared in mixing.prepared],
        }

    def _reference(self) -> list[Record]:
        if self._recorded is None:
            self._recorded = self._ranks(self._mixing.side(()))
        return self._recorded

    def _compare(self, records: list[Record], expected: list[Record]) -> Comparison:
        from ascend_run.tools.verify.compare.comparison import compare

        same = records[0].sizes == expected[0].sizes and len(records) == len(expected)
        return compare(records, expected, against="A", exact=self._exact, same_layout=same)


def _compared(changes: tuple[str, ...], comparison: Comparison) -> Compared:
    fault = comparison.fault
    if fault is None:
        return Compared(changes=changes, state=State.AGREES)
    return Compared(
        changes=changes,
        state=State.DIVERGES,
        where=f"{fault.module} ({fault.phase})",
        step=first_step(comparison.checks),
        why=fault.why,
    )


def _other_parameters(records: Sequence[Record], expected: Sequence[Record]) -> list[str]:
    """Return a message for each parameter that only one of the runs has, or with another shape."""
    shapes = [_shapes(expected), _shapes(records)]
    return [
        f"{name}: {_shape(shapes[0], name)} in A, {_shape(shapes[1], name)} in B"
        for name in dict.fromkeys((*shapes[0], *shapes[1]))
        if shapes[0].get(name) != shapes[1].get(name)
    ]


def _shapes(records: Sequence[Record]) -> Mapping[str, tuple[int, ...]]:
    return {place.name: place.global_shape for record in records for place in record.places}


def _shape(shapes: Mapping[str, Any], name: str) -> str:
    return str([*shapes[name]]) if name in shapes else "missing"


def _cannot_compare(others: Sequence[str], choices: Sequence[Choice]) -> ConfigError:
    shown = [*others[:_SHOWN_PARAMETERS]]
    if len(others) > len(shown):
        shown.append(f"... and {len(others) - len(shown)} more parameters")
    names = ", ".join(choice.name for choice in choices)
    return ConfigError(
        "the runs have other parameters, so that their weights cannot be compared",
        [*shown, f"compare runs of one model architecture; these differ in {names}"],
    )
