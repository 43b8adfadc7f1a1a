"""No test sees what an earlier session, or the user's home, has in a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.session import CLEARED, OWN

READ = """
from huggingface_hub import constants
from hypothesis.configuration import storage_directory
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch.hub import get_dir
from pathlib import Path

examples = storage_directory("examples", intent_to_write=False).path
caches = cache_dir(), triton_cache_dir(0), get_dir()
for place in (Path.home(), constants.HF_HOME, examples, *caches):
    print(place)
"""


def test_every_cache_is_the_session_s_own() -> None:
    session = Path(os.environ["HOME"]).parent
    assert session.name.startswith("ascend-run-tests-")
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, timeout=100, check=True
    )
    places = done.stdout.splitlines()
    assert len(places) == 6
    assert [place for place in places if not Path(place).is_relative_to(session)] == []


def test_variables_that_name_caches_lead_nowhere_else(tmp_path: Path) -> None:
    """A session of its own, where each of them names a folder that was used before."""
    used = {name: str(tmp_path / name) for name in (*OWN, *CLEARED)}
    own = f"{__file__}::{test_every_cache_is_the_session_s_own.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", own],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **used},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing was written there"
