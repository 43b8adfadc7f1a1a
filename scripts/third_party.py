"""Test third-party packages: build wheels, install them into an empty environment, test them there.

python scripts/third_party.py                  # everything
python scripts/third_party.py --only scaffold  # commands, packages, exchange or scaffold alone

Wheels of ascend-run and of the packages under examples/ are built from copies of their sources and
installed into an empty environment. There, in a folder outside of this tree, the commands run, each
package passes its suite and the conformance kit, the suite for context parallelism passes with a
third-party plugin instead of ulysses, and a new package of each kind is created and passes the kit
with the commands that ``ascend-run new-plugin`` prints; their duration is shown. Packages of the
other seams are installed together and tested on one pool of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build/third_party"
EXAMPLES: Final = ("third_party_plugin", "third_party_platform", "third_party_task")
KINDS: Final = ("feature", "platform", "task", "family")
SEAMS: Final = ("attention", "optimizer", "listener")
"""Those that are not the default of a kind."""
LIMIT_SECONDS: Final = 60.0
"""Limit for creating a package and passing the kit, on an idle machine."""
TEST_PACKAGES: Final = ("pytest", "pytest-timeout", "hypothesis")
RUN: Final = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.vocab_size=304",
    "data.seq_length=32",
    "data.tokenizer=data/tokenizer.json",
    "data.train=data/text",
    "train.train_iters=2",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.precision=fp32",
    "run.output_dir=run",
)


def say(text: str) -> None:
    click.echo(f"third-party: {text}")


def call(
    words: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program and return its output.

    Raises:
        click.ClickException: It failed; has its output.
    """
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean_environment(), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        shown = shlex.join(str(word) for word in words)
        raise click.ClickException(f"{shown}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return this process's environment, without variables that add Python packages, and with the
    programs of the virtual environment first on ``PATH``."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": f"{Environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


# -- wheels and environment -------------------------------------------------------------------


def build_wheels() -> dict[str, Path]:
    """Build wheels from clean copies of the sources; return source -> wheel."""
    sources, wheels = BUILD / "sources", BUILD / "wheels"
    for folder in (sources, wheels):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    leftovers = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*_cache")
    own = sources / "ascend_run"
    shutil.copytree(ROOT / "ascend_run", own / "ascend_run", ignore=leftovers)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, own)
    for name in EXAMPLES:
        shutil.copytree(ROOT / "examples" / name, sources / name, ignore=leftovers)
    built = {}
    for name in ("ascend_run", *EXAMPLES):
        target = wheels / name
        options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
        call(
            [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", target, sources / name],
            ROOT,
        )
        (built[name],) = target.glob("*.whl")
    return built


class Environment:
    """A virtual environment with our wheels and what they depend on; kept while nothing changes."""

    folder = BUILD / "venv"
    python = folder / "bin/python"

    def __init__(self, torch: str) -> None:
        self.torch = torch

    def install(self, wheels: Mapping[str, Path]) -> None:
        """Make it where it is not ready, and put the wheels in."""
        ready = self.folder / ".ready"
        if not (ready.is_file() and ready.read_text() == self._key()):
            say("an empty environment, torch first")
            shutil.rmtree(self.folder, ignore_errors=True)
            call([sys.executable, "-m", "venv", self.folder], ROOT)
            self._pip("install", self.torch)
            constraints = ("--constraint", ROOT / "constraints.txt")
            self._pip("install", *constraints, wheels["ascend_run"], *TEST_PACKAGES)
            ready.write_text(self._key())
        self.remove_plugins()
        options = ("--no-index", "--no-deps", "--force-reinstall")
        self._pip("install", *options, *wheels.values())

    @classmethod
    def remove_plugins(cls, but: Sequence[str] = ()) -> None:
        """Uninstall every package of a plugin but these."""
        listed = json.loads(call([cls.python, "-m", "pip", "list", "--format=json"], ROOT))
        names = [row["name"] for row in listed if row["name"].startswith("ascend-run-")]
        if unwanted := [name for name in names if name not in but]:
            cls._pip("uninstall", "--yes", *unwanted)

    @classmethod
    def _pip(cls, *words: str | Path) -> str:
        return call([cls.python, "-m", "pip", "--quiet", *words], ROOT)

    def _key(self) -> str:
        """What the environment stands on."""
        parts = (
            self.torch,
            sys.version,
            (ROOT / "pyproject.toml").read_text(),
            (ROOT / "constraints.txt").read_text(),
            *TEST_PACKAGES,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# -- what is shown in it ----------------------------------------------------------------------


def run_commands(work: Path) -> None:
    """The commands work from the wheel, and a run with another's platform and task trains."""
    found = call([Environment.python, "-c", "import ascend_run; print(ascend_run.__file__)"], work)
    if not Path(found.strip()).is_relative_to(Environment.folder):
        raise click.ClickException(f"tested is {found.strip()}, not the installed wheel")
    (work / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    chosen = ("--platform", "metered-cpu", "--task", "context-pretrain")
    for words in (
        ("--help",),
        ("plugins",),
        ("plugins", "show", "head-exchange"),
        ("new-plugin", "--help"),
        ("preset", "show", "qwen2.5-7b"),
        (
            *("preprocess", "--input", "text.txt", "--train-tokenizer", "300"),
            *("--output-prefix", "data/text"),
        ),
        ("plan", *chosen, *RUN),
        (*chosen, *RUN),
        ("report", "run"),
    ):
        call(["ascend-run", *words], work)
    pages = "ascend_run.reference"
    shown = call([Environment.python, "-c", f"help('{pages}.hooks')"], work)
    if "ascend_defaults(config: RunConfig" not in shown:
        raise click.ClickException("help() shows no reference of the hooks")
    if "</html>" not in (work / "run/report.html").read_text():
        raise click.ClickException("report.html is no page")


def test_packages(work: Path) -> None:
    """Each package's suite and the conformance kit, on what is installed."""
    for name in EXAMPLES:
        place = work / name
        source = BUILD / "sources" / name
        shutil.copytree(source / "tests", place / "tests")
        shutil.copy(source / "pyproject.toml", place)
        say(f"{name}: {_tests(place, '.')}")


def test_exchange(work: Path) -> None:
    """ulysses' suite with another's exchange in its place."""
    shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", work)
    suite = [
        f"tests/plugins/sequence/ulysses/test_{n}.py"
        for n in ("kernel", "parity", "exchange_rules")
    ]
    passed = _tests(work, *suite, environment={"ASCEND_RUN_UNDER_TEST": "head-exchange"})
    say(f"ulysses' suite on head-exchange: {passed}")


def _tests(place: Path, *words: str, environment: Mapping[str, str] | None = None) -> str:
    program = [Environment.python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *words]
    return call(program, place, environment).strip().splitlines()[-1]


def try_scaffold(work: Path) -> None:
    """A new package of each kind, by the commands that are printed; and the linters on it."""
    wheels = [wheel for name in EXAMPLES for wheel in (BUILD / "wheels" / name).glob("*.whl")]
    kept = [wheel.name.partition("-")[0].replace("_", "-") for wheel in wheels]
    for kind in KINDS:
        name = f"outside-{kind}"
        printed = call(["ascend-run", "new-plugin", name, "--kind", kind], work).splitlines()
        commands = [line.strip() for line in printed if line.startswith("  ")]
        seconds = [_timed(lambda c=command: call(shlex.split(c), work)) for command in commands]
        _lint(work / f"ascend-run-{name}")
        each = " + ".join(f"{second:.1f}" for second in seconds)
        verdict = "" if sum(seconds) < LIMIT_SECONDS else f", over the limit of {LIMIT_SECONDS:g} s"
        say(f"new-plugin --kind {kind}: {each} = {sum(seconds):.1f} s{verdict}")
        Environment.remove_plugins(but=kept)
    _try_seams(work)
    Environment.remove_plugins(but=kept)


def _try_seams(work: Path) -> None:
    """A new package of each other seam: installed together, and tested in one session."""
    names = [f"outside-{seam}" for seam in SEAMS]
    for seam, name in zip(SEAMS, names, strict=True):
        call(["ascend-run", "new-plugin", name, "--seam", seam], work)
    packages = [work / f"ascend-run-{name}" for name in names]
    options = [word for package in packages for word in ("--editable", f"{package}[test]")]
    call([Environment.python, "-m", "pip", "--quiet", "install", *options], work)
    checks = [f"--ascend-plugin={name}" for name in names]
    seconds = _timed(lambda: say(_tests(work, *checks, *(str(package) for package in packages))))
    say(f"new-plugin --seam {', '.join(SEAMS)}: their tests and the kit in {seconds:.1f} s")
    for package in packages:
        _lint(package)


def _lint(package: Path) -> None:
    types = ("--python-executable", str(Environment.python), "--cache-dir", str(BUILD / "mypy"))
    for words in (
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy", *types, "src", "tests"),
    ):
        call([sys.executable, "-m", *words], package)


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


PARTS: Final[Mapping[str, Callable[[Path], None]]] = {
    "commands": run_commands,
    "packages": test_packages,
    "exchange": test_exchange,
    "scaffold": try_scaffold,
}


@click.command()
@click.option(
    "--torch", default="torch", help="Requirement of torch for pip, such as torch==2.13.0."
)
@click.option("--only", type=click.Choice([*PARTS]), multiple=True, help="These parts alone.")
def main(torch: str, only: Sequence[str]) -> None:
    """Build, install and test what stands outside of the tree."""
    Environment(torch).install(build_wheels())
    for name, part in PARTS.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="ascend-run-outside-") as folder:
            seconds = _timed(lambda part=part, folder=folder: part(Path(folder)))
        say(f"{name}: passed in {seconds:.0f} s")


if __name__ == "__main__":
    main()
