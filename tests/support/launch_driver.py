"""Start stand-in ranks as a command would: ``launch_driver.py FUNCTION REQUEST OPTIONS``."""

from __future__ import annotations

import json
import sys

from ascend_run.core.launch.options import LaunchOptions
from ascend_run.plugin_api import AscendRunError


def main() -> int:
    function, request, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    try:
        chosen = LaunchOptions(**options)
        from ascend_run.core.launch.agent import launch_ranks

        launch_ranks(f"tests.support.rank_stand_ins:{function}", request, chosen)
    except AscendRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
