"""The checks accept a plugin that is right, and each finds the one that breaks its promise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascend_run.testing.conformance import CHECKS, Check, Means, Subject
from ascend_run.testing.conformance.documentation import has_a_page
from ascend_run.testing.conformance.footprint import Footprint, runs_twice
from ascend_run.testing.conformance.numbers import require_device
from ascend_run.testing.pool import GlooPool, PoolError
from ascend_run.testing.runtime import RankOutcome, load_runtime
from tests.support.fake_distributions import make_distribution

SOURCES = Path(__file__).with_name("bad_plugins")
PACKAGE = "ascend_run_bad_plugins"
RUNNING = {
    f"KIT-{name}"
    for name in [
        "NEEDS",
        "FAMILY",
        "LISTENERS",
        "PATCH",
        "UNDO",
        "AGAIN",
        "DRAWS",
        "IDLE",
        "PARITY",
        "GRADIENTS",
        "RESUME",
    ]
}

BEFORE_A_RUN = [
    ("static:HasAnotherName", "has-another-name", "KIT-LOAD", "has a manifest for other names"),
    (
        "static:ForgetsAnAlias",
        "forgets-an-alias",
        "KIT-NAMES",
        "the name 'its-alias', which has no",
    ),
    (
        "static:LeavesNumericsOut",
        "leaves-numerics-out",
        "KIT-MANIFEST",
        "'numerics' is not explicit in the Manifest; its default is bitwise",
    ),
    (
        "static:ClaimsWhatAHookClaims",
        "claims-what-a-hook-claims",
        "KIT-HOOKS",
        "has Claim.NORM in its manifest; only implementing ascend_norm makes the claim 'norm'",
    ),
    (
        "static:MisspellsAHook",
        "misspells-a-hook",
        "KIT-HOOKS",
        "ascend_self_atention, which is not a hook; did you mean ascend_self_attention?",
    ),
    (
        "imports_torch:ImportsTorch",
        "imports-torch",
        "KIT-IMPORT",
        f"importing {PACKAGE}.imports_torch imports numpy, torch; move it into the hook",
    ),
    ("writes_a_file:WritesAFile", "writes-a-file", "KIT-IMPORT", "writes the file "),
    (
        "changes_the_process:ChangesTheProcess",
        "changes-the-process",
        "KIT-IMPORT",
        "changes the environment variable ASCEND_RUN_BAD_PLUGIN",
    ),
    (
        "static:OptionsThatChange",
        "options-that-change",
        "KIT-OPTIONS",
        "Changeable can be changed after it is made; use attrs.frozen",
    ),
    (
        "static:OptionsWithoutBound",
        "options-without-bound",
        "KIT-BOUNDS",
        "size accepts any number from",
    ),
    (
        "static:OptionsWithoutLeast",
        "options-without-least",
        "KIT-BOUNDS",
        "size accepts -1.09951e+12 and other numbers below 1.09951e+12",
    ),
    (
        "static:CrashesAtItsBound",
        "crashes-at-its-bound",
        "KIT-BOUNDS",
        "plugins.crashes-at-its-bound.size=0 is accepted, but a run with it fails: ZeroDivision",
    ),
    (
        "static:MisspellsAnother",
        "misspells-another",
        "KIT-MANIFEST",
        "names 'pretrian', which is not installed; did you mean 'pretrain'?",
    ),
    (
        "static:SharesState",
        "shares-state",
        "KIT-STATE",
        "the class attribute 'seen' is a list, which all instances share",
    ),
    (
        "static:HasNoPage",
        "has-no-word-in-the-readme",
        "KIT-DOCS",
        "does not name 'has-no-word-in-the-readme'",
    ),
]
IN_A_RUN = [
    (
        "replaces_a_function:ReplacesAFunction",
        "replaces-a-function",
        "KIT-PATCH",
        "\n".join(
            f"  it replaces {name}; return a Patch from ascend_patches, which is undone"
            for name in (
                "ascend_run.core.train.step.evaluate",
                "megatron.core.package_info.PRE_RELEASE",
                "megatron.core.utils._ASYNC_IO_LOOP",
                "megatron.core.utils.divide",
                "os.getlogin",
            )
        ),
    ),
    (
        "running:LeavesAVariable",
        "leaves-a-variable",
        "KIT-UNDO",
        "it does not restore: the environment variable OMP_WAIT_POLICY_OF_A_BAD_PLUGIN",
    ),
    (
        "running:RemembersARun",
        "remembers-a-run",
        "KIT-AGAIN",
        "in its second run, the loss of step 0",
    ),
    (
        "running:IdleAndActive",
        "idle-and-active",
        "KIT-IDLE",
        "dense, one rank, where parallel.tensor_model_parallel_size <= 1 and so it should be idle",
    ),
    ("running:RoundsOnce", "rounds-once", "KIT-PARITY", "against one rank without it: "),
    ("running:BreaksExperts", "breaks-experts", "KIT-PARITY", "moe, one rank, gradients, against"),
    ("running:FlipsABit", "flips-a-bit", "KIT-PARITY", "has max error "),
    ("running:DrawsANumber", "draws-a-number", "KIT-DRAWS", "it draws from the generator "),
    (
        "gradients:ForgetsTheCap",
        "forgets-the-cap",
        "KIT-GRADIENTS",
        "dense, one rank, the gradient of the attention of CappedForward with ",
    ),
    (
        "gradients:DetachesTheRouter",
        "detaches-the-router",
        "KIT-GRADIENTS",
        "decoder.layers.0.mlp.router.weight gets no gradient from the main loss, which depends on",
    ),
    (
        "gradients:IgnoresTheRouter",
        "ignores-the-router",
        "KIT-GRADIENTS",
        "decoder.layers.0.mlp.router.weight gets no gradient from the main loss, only from aux",
    ),
    (
        "running:ForgetsItsSteps",
        "forgets-its-steps",
        "KIT-RESUME",
        "the loss of step 4 is ",
    ),
    (
        "families:MapsABiasWrong",
        "seed_oss",
        "KIT-FAMILY",
        "tiny: its weights cannot be read: model.layers.0.self_attn.q_proj.bias is [48], expected",
    ),
    (
        "attention:MissesItsNeed",
        "misses-its-need",
        "KIT-NEEDS",
        "dense, one rank, the attention kernel is called with 'softcap', which neither an option",
    ),
    (
        "listening:IsNeverCalled",
        "is-never-called",
        "KIT-LISTENERS",
        "ascend_after_evaluation is never called in a run with logs, evaluations, a checkpoint",
    ),
    (
        "listening:ForgetsItsCount",
        "forgets-its-count",
        "KIT-RESUME",
        "dense, one rank, rank 0, the logged 'counts/steps' of step 4 is 1, expected 4 as without",
    ),
    (
        "listening:TakesAnothersCount",
        "takes-anothers-count",
        "KIT-RESUME",
        "dense, tp=2, rank 1, the logged 'counts/steps' of step 4 is 5, expected 8 as without",
    ),
]
LEAVING = {"replaces-a-function", "leaves-a-variable"}
EVERY = [
    ("static:IsRight", "is-right", "", ""),
    ("running:LeavesMuch", "leaves-much", "", ""),
    *BEFORE_A_RUN,
    *IN_A_RUN,
]


@pytest.fixture(autouse=True, scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("site")
    modules = {f"{PACKAGE}/{path.name}": path.read_text() for path in SOURCES.glob("*.py")}
    points: dict[str, dict[str, str]] = {"ascend_run.plugins": {}, "ascend_run.models": {}}
    for value, name, _, _ in EVERY:
        is_family = value.startswith("families:")
        group = points["ascend_run.models" if is_family else "ascend_run.plugins"]
        group[name] = f"{PACKAGE}.{value}"
    make_distribution(folder, "ascend-run-bad", points, modules)
    readme = " ".join(name for _, name, code, _ in EVERY if code != "KIT-DOCS")
    with next(folder.glob("*.dist-info/METADATA")).open("a") as metadata:
        metadata.write(f"\n# Bad plugins\n\n{readme} its-alias; option: size\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def means(gloo_pool: GlooPool) -> Means:
    return Means(load_runtime(), lambda: gloo_pool)


@pytest.fixture(scope="module")
def own_means() -> Iterator[Means]:
    """Ranks for plugins after which the checks start new ones."""
    with GlooPool() as pool:
        yield Means(load_runtime(), lambda: pool)


@pytest.fixture(scope="module")
def subjects(means: Means, own_means: Means) -> dict[str, Subject]:
    """Each with the runs that its checks share."""
    return {name: Subject(name, own_means if name in LEAVING else means) for _, name, _, _ in EVERY}


def test_a_slow_run_names_the_option_that_extends_its_limit() -> None:
    class SlowPool(GlooPool):
        def run(self, *_: Any, timeout: float = 0.0, **__: Any) -> list[Any]:
            raise PoolError(0, "Hang", f"still running after {timeout:g} s", "")

    slow = Means(load_runtime(), SlowPool, timeout=7.0)
    check = Check("KIT-X", "it runs", lambda subject: subject.means.job(print, 1))
    (problem,) = check.judge(Subject("gmm", slow)).problems
    assert "Hang: still running after 7 s; if it is only slow, raise --ascend-timeout" in problem


def test_the_page_of_an_editable_package_is_its_readme_as_it_is_now(tmp_path: Path) -> None:
    package = tmp_path / "src/ring"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text("ring has the option every")
    module: Any = SimpleNamespace(__file__=str(package / "__init__.py"))
    subject: Any = SimpleNamespace(
        manifest=SimpleNamespace(name="ring"),
        plugin=SimpleNamespace(__module__="ring_of_readme"),
        facts=SimpleNamespace(options=[SimpleNamespace(name=name) for name in ("every", "width")]),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "ring_of_readme", module)
        problems = [*has_a_page(subject)]
    assert problems == [f"{tmp_path / 'README.md'} does not name the option 'width'"]


def failures(subject: Subject, checks: list[Check]) -> dict[str, str]:
    """Code -> message, of the checks that find something."""
    verdicts = {check: check.judge(subject) for check in checks}
    return {c.code: c.message(subject.name, v) for c, v in verdicts.items() if v.problems}


STATIC_CHECKS = [check for check in CHECKS if check.code not in RUNNING]


def test_a_right_plugin_passes_every_check(means: Means) -> None:
    assert failures(Subject("is-right", means), list(CHECKS)) == {}


JUDGED = [
    pytest.param(*row[1:], check, id=f"{row[1]}-{check.code}")
    for rows, checks in ((BEFORE_A_RUN, STATIC_CHECKS), (IN_A_RUN, CHECKS))
    for row in rows
    for check in checks
]
"""Each bad plugin, and each check: what is wrong before a run must not be run."""


def shown(name: str, code: str, check: Check) -> list[str]:
    """Return what the suite must show: each check that finds something, the last one of states on
    one rank. That KIT-UNDO does is shown by ``test_whatever_a_run_leaves_is_named`` too."""
    if check.code != code or code == "KIT-UNDO":
        return ["another check"]
    return [] if name == "takes-anothers-count" else [code]


@pytest.mark.exhaustive(by=shown)
@pytest.mark.parametrize(("name", "code", "message", "check"), JUDGED)
def test_what_is_wrong_is_found_by_one_check_and_no_other(
    subjects: dict[str, Subject], name: str, code: str, message: str, check: Check
) -> None:
    found = failures(subjects[name], [check])
    if check.code != code:
        assert found == {}
        return
    assert [*found] == [code]
    assert found[code].startswith(f"{code}: {name} does not satisfy: ")
    assert message in found[code]


def test_whatever_a_run_leaves_is_named(own_means: Means) -> None:
    (check,) = (check for check in CHECKS if check.code == "KIT-UNDO")
    found = check.judge(Subject("leaves-much", own_means)).problems

    left = [problem.partition(": ")[2].partition(";")[0].partition(" (was")[0] for problem in found]
    assert {place.partition(" /")[0] for place in left} == {
        "an alarm",
        "numpy's treatment of errors",
        "the default socket timeout",
        "the handler of signal 12",
        "the number of parameters in memory",
        "the open file",
        "the process groups",
        "the threads",
        "torch's number of threads",
        "torch.nn.modules.module._global_forward_hooks",
        "what runs at exit (atexit)",
    }


def test_ranks_on_which_a_device_was_tried_are_not_used_again() -> None:
    class OneRank:
        asked = closed = 0

        def run(self, *_: Any, **__: Any) -> list[str]:
            self.asked += 1
            return [""]

        def close(self) -> None:
            self.closed += 1

    pool: Any = OneRank()
    subject = Subject("cpu", Means(load_runtime(), lambda: pool))
    require_device(subject)
    require_device(subject)

    assert (pool.asked, pool.closed) == (1, 1)


def test_a_second_run_is_compared_by_the_state_of_the_optimizer_too(means: Means) -> None:
    def ran(exp_avg: float, seed: float) -> RankOutcome:
        held = {"optimizer/exp_avg (0,)": exp_avg, "rng/torch (0,)": seed}
        state = {name: torch.tensor(value) for name, value in held.items()}
        return RankOutcome(losses=(1.0,), grad_norms=(1.0,), shards=(), state=state)

    first, second = ran(1.0, 2.0), ran(1.5, 2.5)
    subject = Subject("any", means)
    subject.once("footprint", lambda: [Footprint((), (), (), first, first, second)])

    message = "in its second run, optimizer/exp_avg (0,) of the checkpoint differs on rank 0"
    assert [*runs_twice(subject)] == [message]


def test_no_two_bad_plugins_get_one_message(means: Means) -> None:
    rows = [*BEFORE_A_RUN, *IN_A_RUN]

    assert len({(code, message) for _, _, code, message in rows}) == len(rows) >= 12
    assert {code for _, _, code, _ in rows} == {check.code for check in CHECKS}
