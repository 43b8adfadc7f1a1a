"""``python -m benchmarks.campaigns NAME``: run a campaign in full, or what is left of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .campaign import find, names
from .runner import run_campaign


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where the result does not pass, 3 where cases are left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaigns", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after so many cases")
    parser.add_argument("--fresh", action="store_true", help="run every case again")
    parser.add_argument(
        "--new", action="store_true", help="keep the records of cases whose code has changed"
    )
    options = parser.parse_args(arguments)
    result = run_campaign(
        find(options.name),
        workers=options.workers,
        fresh=options.fresh,
        new=options.new,
        limit=options.limit,
    )
    if result is None:
        print("cases are left; the same command continues with them")
        return 3
    shown = {key: value for key, value in result.items() if key not in ("failures", "records")}
    print(json.dumps(shown, indent=2))
    for failure in result["failures"][:20]:
        print(f"{failure['verdict']}: {failure['case']}: {failure.get('why', '')}")
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
