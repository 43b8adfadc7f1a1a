"""Start fake ranks as a command would: ``launch_driver.py FUNCTION REQUEST OPTIONS``.

Prints each attempt's failure, and whether rank 0 ran in this process, to standard output as JSON.
"""

from __future__ import annotations

import json
import sys

from ascend_run.launch.options import LaunchOptions
from ascend_run.plugin_api import AscendRunError


def note(why: str, lost_peer: bool) -> None:
    print(json.dumps([why, lost_peer]), flush=True)


def main() -> int:
    function, request, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    try:
        chosen = LaunchOptions(**options)
        from ascend_run.launch.agent import launch_ranks

        target = f"tests.support.rank_stand_ins:{function}"
        print(json.dumps(launch_ranks(target, request, chosen, note)), flush=True)
    except AscendRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
