"""No test sees what an earlier session, or the user's home, has in a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.session import CLEARED, OWN, SHARED

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


def test_every_cache_is_the_session_s_own(request: pytest.FixtureRequest) -> None:
    """That of inductor is of all workers of xdist."""
    session, common = (Path(os.environ[name]).parent for name in ("HOME", SHARED))
    assert session.name.startswith("ascend-run-tests-")
    assert common.name.startswith("ascend-run-tests-")
    assert (common == session) is not hasattr(request.config, "workerinput")
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, timeout=100, check=True
    )
    places = done.stdout.splitlines()
    assert len(places) == 6
    owners = [session, session, session, common, common, session]
    for place, owner in zip(places, owners, strict=True):
        assert Path(place).is_relative_to(owner), place


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
