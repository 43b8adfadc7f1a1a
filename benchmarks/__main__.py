"""``python -m benchmarks``: measure, print the table, write the result; docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from .catalogue import all_benchmarks, matching
from .protocol import PEERS_PYTHON, Benchmark, NotMeasured, Settings
from .rows import NO_GPU, PARTIAL, RESULTS, Row, print_table, read_rows, unmeasured, write_rows

FULL_PAIRS = 5


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="rows with this in their name")
    parser.add_argument(
        "--missing", action="store_true", help="rows that latest.json lacks, added to it"
    )
    parser.add_argument("--quick", action="store_true", help="1 pair, 1 step: no true figures")
    parser.add_argument("--pairs", type=int, default=FULL_PAIRS, metavar="N")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the rows' names, and end")
    parser.add_argument("--plot", action="store_true", help="draw the last full run, and end")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    if options.missing and (options.quick or options.only or options.pairs < FULL_PAIRS):
        parser.error("--missing measures whole rows in full; leave out --only, --quick and --pairs")
    if options.only is not None and not matching(options.only):
        parser.error(f"--only {options.only!r} matches no row; see --list")
    return options


def is_full(options: argparse.Namespace) -> bool:
    """Whether the result may replace the one in git."""
    return not options.quick and options.only is None and options.pairs >= FULL_PAIRS


def missing(kept: Sequence[Row]) -> list[Benchmark]:
    """Return the benchmarks that these rows do not have; rows are independent of one another."""
    names = {row.name for row in kept if row.ours is not None}
    return [benchmark for benchmark in all_benchmarks() if benchmark.name not in names]


def merged(kept: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Return the new and the old rows in the order of the catalogue, without removed benchmarks.

    Results of a GPU are preserved if this machine has none.
    """
    by_name = {row.name: row for row in kept}
    for row in measured:
        if row.device != NO_GPU or row.name not in by_name:
            by_name[row.name] = row
    return [by_name[b.name] for b in all_benchmarks() if b.name in by_name]


def measure(benchmark: Benchmark, settings: Settings) -> Row:
    """Measure one benchmark; a failure results in a row too."""
    try:
        return benchmark.measure(settings)
    except NotMeasured as reason:
        return unmeasured(
            name=benchmark.name,
            goal=benchmark.goal,
            reason=str(reason),
            device=benchmark.device(),
        )


def measure_all(benchmarks: Sequence[Benchmark], settings: Settings) -> list[Row]:
    """Measure all benchmarks; after each, write the rows so far to the file of partial results."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    rows: list[Row] = []
    # Redrawn only on a report: a thread that redraws would run beside what is measured.
    what = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), what)
    with Progress(*columns, auto_refresh=False, expand=True) as progress:
        task = progress.add_task("", total=len(benchmarks))

        def report(text: str) -> None:
            progress.update(task, description=text, refresh=True)

        reporting = attrs.evolve(settings, report=report)
        for benchmark in benchmarks:
            rows.append(measure(benchmark, reporting))
            write_rows(rows, PARTIAL)
            progress.update(task, advance=1, refresh=True)
    return rows


def is_wrong(row: Row) -> bool:
    """Whether it should have been measured on this machine but was not, or failed."""
    return (row.ours is None and row.device != NO_GPU) or row.note.startswith("FAILED")


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Return exit code 1 if a row is wrong; missed goals and a missing GPU do not count."""
    options = parse(arguments)
    if options.list:
        say("\n".join(benchmark.name for benchmark in all_benchmarks()))
        return 0
    if options.plot:
        from .plot import PLOT, svg

        PLOT.write_text(svg(read_rows(RESULTS)))
        say(str(PLOT))
        return 0
    settings = Settings(pairs=options.pairs, peers_python=options.peers_python)
    if options.quick:
        settings = Settings.quick(peers_python=options.peers_python)
    benchmarks = all_benchmarks() if options.only is None else matching(options.only)
    kept = read_rows(RESULTS) if is_full(options) and RESULTS.exists() else []
    if options.missing:
        benchmarks = missing(kept)
    rows = measure_all(benchmarks, settings)
    print_table(rows)
    target = PARTIAL
    if is_full(options):
        target = RESULTS
        write_rows(merged(kept, rows), RESULTS)
    say(f"written: {target}")
    return int(any(map(is_wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())
