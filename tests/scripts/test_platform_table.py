"""The page of platforms is fresh, and says what the manifests say."""

from __future__ import annotations

from ascend_run.plugin_api import Support
from ascend_run.registry.discovery import discover
from ascend_run.tools.plugins.listing import listing
from scripts.platform_table import PAGE, meanings, page

ROWS = listing(discover())


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(ROWS), "run scripts/platform_table.py"


def test_every_state_has_its_meaning() -> None:
    assert [state for state, _ in meanings()] == [str(state) for state in Support]
    assert all(says.endswith(".") for _, says in meanings())


def test_a_platform_that_a_manifest_does_not_name_is_refused_in_the_table() -> None:
    (npu,) = (line for line in page(ROWS).splitlines() if line.startswith("| [npu]"))
    assert npu.split(" | ")[2:4] == ["refused", "refused"]
