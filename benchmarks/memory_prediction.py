"""``python -m benchmarks.memory_prediction``: compare the memory that ``plan`` estimates with that
of real runs. Bytes are counted, so that the results do not depend on the load of the machine.

Writes ``benchmarks/results/memory_prediction.json`` and exits with 1 if the error of a rank's peak
is more than 5 %, or weights or gradient buffers differ from the estimate. With names of layouts it
measures these, and keeps the rows of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.cost_model.estimate import RankCost, expected_costs

from .memory_layouts import CASES, Case
from .memory_pairs import pair_values
from .memory_worker import measure

TOLERANCE: Final = 0.05
STATE_TOLERANCE: Final = 1e-3
RESULT: Final = Path(__file__).parent / "results" / "memory_prediction.json"


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether persistent memory is as estimated: weights and gradient buffers exactly, the
    optimizer state, in memory and in files, except for the padding of shards."""
    pairs = [row[name] for name in ("weights", "gradient_buffers")]
    states = [row[name] for name in ("optimizer", "files")]
    most = STATE_TOLERANCE * sum(measured for _, measured in states)
    return all(a == b for a, b in pairs) and all(abs(a - b) <= most for a, b in states)


def with_pairs(case: Case) -> Case:
    """Add the files of a case that reads pairs."""
    if not case.reads_pairs:
        return case
    return attrs.evolve(case, values={**pair_values("dpo"), **case.values})


def plan_of(case: Case) -> tuple[PreparedRun, tuple[RankCost, ...]]:
    """Return the prepared run, and the estimate for each pipeline stage."""
    case = with_pairs(case)
    values = {"data.train": ["none"], "platform": "cpu", **case.config}
    values["enable"] = [*case.plugins]
    raw = RawConfig(values={key: RawValue(value, "the benchmark") for key, value in values.items()})
    prepared = prepare_raw(raw, case.ranks)
    hooks = Hooks(prepared.instances())
    return prepared, expected_costs(prepared.config, prepared.layout, hooks)


def compare(case: Case, pool: GlooPool) -> list[dict[str, Any]]:
    """Return one row per rank: estimated and measured bytes."""
    case = with_pairs(case)
    prepared, costs = plan_of(case)
    rows = []
    given = case.config, case.plugins, case.memory_gb
    for rank, measured in enumerate(pool.run(measure, case.ranks, *given, timeout=120)):
        expected = costs[prepared.layout.coordinate("pp", rank)].memory
        # The host of a CPU is the device.
        in_memory = expected.optimizer + expected.off_device - expected.in_files
        rows.append(
            {
                "layout": case.name,
                "model": case.model,
                "rank": rank,
                "weights": [round(expected.weights), measured.weights],
                "gradient_buffers": [round(expected.gradient_buffers), measured.gradients],
                "optimizer": [round(in_memory), measured.optimizer],
                "files": [round(expected.in_files), measured.files],
                "peak": [round(expected.peak), measured.peak],
                "off": round(expected.peak / measured.peak - 1, 5),
                "moment": expected.moment,
            }
        )
    return rows


def with_kept(rows: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the rows of all layouts in their order: measured ones, and of others the kept ones."""
    measured = {row["layout"] for row in rows}
    found = [*rows, *(row for row in kept if row["layout"] not in measured)]
    order = {case.name: at for at, case in enumerate(CASES)}
    return sorted((r for r in found if r["layout"] in order), key=lambda r: order[r["layout"]])


def result_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the file."""
    worst, exact = max(abs(row["off"]) for row in rows), all(map(is_exact, rows))
    return {
        "command": "python -m benchmarks.memory_prediction",
        "unit": "bytes, [expected, measured]",
        "layouts": len({row["layout"] for row in rows}),
        "ranks": len(rows),
        "tolerance": TOLERANCE,
        "what_lasts_is_exact": exact,
        "worst": worst,
        "passes": worst <= TOLERANCE and exact,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the given layouts, or all."""
    wanted = list(sys.argv[1:] if arguments is None else arguments)
    cases = [case for case in CASES if not wanted or case.name in wanted]
    rows: list[dict[str, Any]] = []
    with GlooPool() as pool:
        for case in cases:
            own = compare(case, pool)
            rows += own
            worst = max(own, key=lambda row: abs(row["off"]))
            print(f"{worst['off']:+8.2%}  {case.name}", flush=True)
            kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
            RESULT.write_text(json.dumps(result_of(with_kept(own, kept)), indent=1) + "\n")
    measured = result_of(rows)
    print(f"{len(cases)} layouts, {len(rows)} ranks: at most {measured['worst']:.2%} off")
    return 0 if measured["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
