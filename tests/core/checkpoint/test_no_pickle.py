"""Nothing that is read from a checkpoint can run code: no pickle, on any path."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import ascend_run

PACKAGE = Path(ascend_run.__file__).parent

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "pd.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
}


OF_OTHER_FORMATS: Mapping[str, list[str]] = {
    "tools/convert/formats/pickled_file.py": ["torch.save"],
    "tools/convert/formats/safe_pickle.py": ["pickle", "torch.load"],
    "tools/convert/formats/torch_dist.py": ["pickle", "torch.save", "torch.save"],
    "tools/convert/formats/torch_dist_index.py": ["pickle"],
}
"""Converting Megatron's and torch's checkpoints, which are pickles: written, and read by unpicklers
that make tensors and records only (tests/tools/convert, hostile files)."""

OF_OWN_RANKS: Mapping[str, list[str]] = {
    "tools/verify/capture/training_record.py": ["torch.save", "torch.load"],
    "tools/verify/rank_jobs.py": ["dist.broadcast_object_list"],
}
"""What the ranks that ``verify`` has started itself write to a private temporary folder, read with
``weights_only=True``, and the name of that folder."""


def unsafe_uses(source: str) -> list[str]:
    """Imports, calls and arguments that unpickle, or that pickle over the network."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES
        ):
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).replace("torch.distributed.", "dist.")
            found += [name] if name in UNSAFE_CALLS else []
            found += [
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            ]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.distributed.all_gather_object(a, b)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_gate_sees_each_kind_of_use(source: str) -> None:
    assert unsafe_uses(source)


def test_nothing_in_the_package_unpickles() -> None:
    # The testing kit hands test functions to processes that it started itself.
    sources = [p for p in PACKAGE.rglob("*.py") if "testing" not in p.relative_to(PACKAGE).parts]
    assert len(sources) > 30
    used = {path.relative_to(PACKAGE).as_posix(): unsafe_uses(path.read_text()) for path in sources}
    assert {path: uses for path, uses in used.items() if uses} == {
        **OF_OTHER_FORMATS,
        **OF_OWN_RANKS,
    }


PROGRAM = """
import sys, torch
from ascend_run.core.checkpoint import FileStore, choose
from ascend_run.plugin_api import TensorShard

found = []
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)

def shard():
    return TensorShard(key="t", tensor=torch.ones(4, 4), global_shape=(4, 4), offset=(0, 0))

store = FileStore(sys.argv[1])
store.save(1, [shard()], {"a": [1, {"b": None}]})
store.save(2, [shard()], {})
assert choose(store).step == 2
store.load(1, [shard()])
assert found == [], found
import collections, pickle
pickle.loads(pickle.dumps(collections.OrderedDict()))
assert found, "the hook does not listen"
"""


def test_saving_choosing_and_loading_never_look_up_a_pickled_class(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
