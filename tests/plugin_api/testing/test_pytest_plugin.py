"""What every pytest run pays where ascend-run is installed."""

from __future__ import annotations

import subprocess
import sys


def test_loading_the_pytest_plugin_imports_neither_torch_nor_any_plugin() -> None:
    program = (
        "import sys, ascend_run.plugin_api.testing.pytest_plugin\n"
        "heavy = ('torch', 'megatron', 'numpy', 'ascend_run.plugins', 'ascend_run.registry')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == "[]"
