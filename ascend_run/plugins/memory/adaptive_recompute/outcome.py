"""What was chosen and why, for the log and the report. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import StorageError
from ascend_run.plugins.memory import in_mib

if TYPE_CHECKING:
    from .decision import Decision

FILE_NAME: Final = "adaptive_recompute.jsonl"
"""In the run folder; it has the last decision."""


@attrs.frozen(kw_only=True)
class Outcome:
    """A decision and what led to it."""

    step: int  #: The first one that it holds for.
    decision: Decision
    budget: int | None  #: None: no budget yet.
    before: int  #: Bytes measured in the steps before.
    after: int | None = None  #: Bytes measured with it; None: not yet.

    def log_choice(self) -> None:
        found = self.decision
        log(
            "chosen",
            budget_bytes=self.budget,
            expected_bytes=found.expected,
            layers=found.by_layer(),
            measured=[kind.record() for kind in found.kinds],
            link=found.speeds(),
        )
        if self.budget is not None and found.expected > self.budget:
            log(
                "over_budget",
                warns=True,
                budget_bytes=self.budget,
                expected_bytes=found.expected,
                fix="the layers now keep as little as they can; set plugins.adaptive-recompute."
                f"activation_mb to at least {in_mib(found.least)}",
            )

    def measured(self, nbytes: int) -> Outcome:
        """Return it with the bytes that the layers keep, and log them."""
        log("measured", bytes=nbytes, expected_bytes=self.decision.expected)
        return attrs.evolve(self, after=nbytes)

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the table and the values of each row."""
        decision = self.decision
        title = f"Kept for backward by all layers of rank 0, from step {self.step}"
        yield title, {"": "measured before", "bytes": self.before}
        yield title, {"": "budget", "bytes": "none" if self.budget is None else self.budget}
        yield title, {"": "least that can be kept", "bytes": decision.least}
        yield title, {"": "expected of the choice", "bytes": decision.expected}
        measured = "not measured" if self.after is None else self.after
        yield title, {"": "measured with it", "bytes": measured}
        for layer, kind, treatment in decision.items():
            yield (
                "Chosen: the least time within the budget",
                {
                    "layer": str(layer),
                    "recomputed or swapped": treatment.words,
                    "bytes kept of a forward": kind.nbytes[treatment],
                    "forwards at once": max(kind.in_flight),
                    "milliseconds it takes": kind.spent(treatment) / 1e6,
                },
            )
        for kind in decision.kinds:
            layers = ", ".join(map(str, kind.indices()))
            for choice in kind.useful_choices():
                yield (
                    "What there was to choose from, as measured",
                    {
                        "layers": layers,
                        "recomputed or swapped": choice.treatment.words,
                        "bytes kept of a forward": choice.nbytes,
                        "milliseconds it takes": choice.cost / 1e6,
                    },
                )

    def write(self, folder: str) -> None:
        """Write the rows, in place of those of an earlier decision.

        Raises:
            StorageError: The file cannot be written.
        """
        path = Path(folder) / FILE_NAME
        lines = [json.dumps({"title": title, "values": row}) + "\n" for title, row in self.rows()]
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text("".join(lines), encoding="utf-8")
            new.chmod(0o640)
            os.replace(new, path)
        except OSError as error:
            raise StorageError(
                f"adaptive-recompute: cannot write {path}",
                [f"{error.strerror or error}; make room, or choose another run.output_dir"],
            ) from error


def log(event: str, *, warns: bool = False, **fields: object) -> None:
    """Log an event of the plugin."""
    import structlog

    to = structlog.get_logger()
    (to.warning if warns else to.info)(f"adaptive-recompute.{event}", **fields)
