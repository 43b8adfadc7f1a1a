"""Fifty installed packages that are malicious or broken, each in a different way.

All are in one folder, as an installer leaves them. Every module first writes a canary: an empty
file next to it that shows a test that it ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import attrs

from .fake_distributions import make_distribution, plugin_source

CANARY = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
FEATURES = "ascend_run.plugins"
GOOD_INFO = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


@attrs.frozen(kw_only=True)
class Hostile:
    """One package."""

    what: str
    """Such as ``sys-exit-at-import``: also the end of its distribution's name."""
    plugin: str = ""
    """The name of its plugin; ``what`` if empty."""
    source: str = ""
    """Source of its module, after the canary; empty is a valid plugin."""
    group: str = FEATURES
    value: str = ""
    """Value of its entry point; the class of its module if empty."""
    files: Mapping[str, bytes | None] = attrs.field(factory=dict)
    """Metadata files to replace, or with None to remove."""
    named: str = ""
    """The expected error when a command names the plugin; empty if it may be used."""
    listed: str = ""
    """The expected text in the list of plugins; its name if empty."""

    @property
    def name(self) -> str:
        return self.plugin or self.what

    @property
    def distribution(self) -> str:
        return f"hostile-{self.what}"

    @property
    def module(self) -> str:
        return f"hostile_{self.what.replace('-', '_')}"

    def install(self, folder: Path) -> None:
        """Write it to a folder on ``sys.path``."""
        source = CANARY + (dedent(self.source) or plugin_source(self.name))
        points = {self.group: {self.name: self.value or f"{self.module}:Plugin"}}
        make_distribution(folder, self.distribution, points, {f"{self.module}.py": source})
        info = folder / f"{self.distribution.replace('-', '_')}-1.0.dist-info"
        for file, content in self.files.items():
            if content is None:
                (info / file).unlink()
            else:
                (info / file).write_bytes(content)


def _raises(what: str, statement: str, named: str) -> Hostile:
    return Hostile(what=what, source=statement, named=named)


def _does(what: str, statement: str) -> Hostile:
    """Return an otherwise valid plugin whose import has a side effect."""
    return Hostile(what=what, source=f"{statement}\n{plugin_source(what)}")


def _declares(what: str, manifest: str, named: str) -> Hostile:
    return Hostile(what=what, source=plugin_source(what, manifest), named=named)


def _class(what: str, body: str, named: str) -> Hostile:
    return Hostile(what=what, source=body, named=named)


def _metadata(what: str, files: Mapping[str, bytes | None], listed: str) -> Hostile:
    return Hostile(what=what, files=files, named="unknown plugin", listed=listed)


_NO_NAME = b"Metadata-Version: 2.1\nVersion: 1.0\n"
_HUGE = b"Metadata-Version: 2.1\nName: hostile-huge-metadata\nVersion: 1.0\n\n" + b"x" * 8_000_000
_MANY = "\n".join(f"p{i} = nowhere:Plugin" for i in range(5000)).encode()

AT_IMPORT = (
    _does("prints-at-import", "print('[]')"),
    _does("starts-a-thread", "import threading; threading.Thread(target=lambda: None).start()"),
    _does("registers-at-exit", "import atexit; atexit.register(lambda: None)"),
    _does("changes-environment", "import os; os.environ['ASCEND_RUN_HOSTILE'] = '1'"),
    _does("changes-sys-path", "import sys; sys.path.append('/nowhere/hostile')"),
    _does("writes-to-stderr", "import sys; sys.stderr.write('loud')"),
    _does("sleeps-at-import", "import time; time.sleep(1)"),
    _does("filters-warnings", "import warnings; warnings.filterwarnings('default')"),
    _raises("sys-exit-at-import", "import sys; sys.exit(0)", "it called sys.exit(0)"),
    _raises("exits-without-code", "raise SystemExit", "it called sys.exit(None)"),
    _raises("os-exit-at-import", "import os; os._exit(0)", "it called os._exit(0)"),
    _raises("syntax-error", "def broken(:", "SyntaxError"),
    _raises("null-bytes", "x = '\0'", "failed to import"),
    _raises("import-error", "import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    _raises("raises-value-error", "raise ValueError('no\\n luck')", "ValueError: no luck"),
    _raises("raises-keyboard-interrupt", "raise KeyboardInterrupt", "it raised KeyboardInterrupt"),
    _raises("raises-generator-exit", "raise GeneratorExit", "it raised GeneratorExit"),
    _raises("own-base-exception", "class E(BaseException): ...\nraise E", "it raised E"),
    _raises("recursion-error", "def f(): f()\nf()", "RecursionError"),
    _raises("assertion-error", "assert 1 == 2", "AssertionError"),
    _raises("memory-error", "raise MemoryError", "MemoryError"),
    _raises("long-message", "raise ValueError('x' * 10**6)", "ValueError: xxx"),
)
DECLARED = (
    _declares("newer-api", "requires_api='>=7'", "requires plugin API >=7 and this is API 0"),
    _declares("newer-field", "rank_groups=()", "newer plugin API: unknown field(s) rank_groups"),
    _declares("api-version-text", "requires_api='0'", "'0' is not a range of API versions"),
    _declares("api-version-number", "requires_api=0", "0 is not a range of API versions"),
    _declares("aliases-a-number", "aliases=7", "whose aliases is 7, which is of the wrong type"),
    _declares("requires-numbers", "requires=(7,)", "whose requires is (7,)"),
    _declares("platforms-a-list", "platforms=['cpu']", "whose platforms is ['cpu']"),
    _declares("platforms-of-text", "platforms={'cpu': 'yes'}", "whose platforms is {'cpu': 'yes'}"),
    _declares("conflicts-of-numbers", "conflicts={'b': 1}", "whose conflicts is {'b': 1}"),
    _declares("conflicts-a-text", "conflicts='all'", "whose conflicts is 'all'"),
    _declares("level-nine", "level=9", "'level' must be in (0, 1, 2, 3)"),
    Hostile(what="name-in-capitals", source=plugin_source("CAPITALS"), named="must be kebab-case"),
    Hostile(what="other-name", source=plugin_source("somebody"), named="for other names (somebody"),
    Hostile(
        what="lying-alias",
        source=plugin_source("cpu", "aliases=('lying-alias',)"),
        named="an alias of 'cpu', which has no entry point to the same class",
    ),
    Hostile(what="wrong-group", group="ascend_run.tasks", named="belongs in ascend_run.plugins"),
)
CLASSES = (
    _class("a-function", "def Plugin(config): ...", "is not a plugin"),
    _class("a-number", "Plugin = 3", "is not a plugin"),
    _class("no-attribute", "x = 1", "has no attribute 'Plugin'"),
    _class("no-manifest", "class Plugin: ...", "is not a plugin"),
    _class("manifest-a-text", "class Plugin:\n    manifest = 'ring'", "is not a plugin"),
    _class(
        "manifest-raises",
        """
        class Meta(type):
            @property
            def manifest(cls):
                raise RuntimeError("not today")

        class Plugin(metaclass=Meta): ...
        """,
        "cannot be read: RuntimeError: not today",
    ),
    Hostile(
        what="config-a-dict",
        source=plugin_source("config-a-dict") + "\nPlugin.config_class = dict\n",
        named="must be an attrs class",
    ),
    Hostile(what="bad-value", value="not a value!", named="failed to import not a value!"),
    Hostile(what="missing-module", value="nowhere_at_all:Plugin", named="No module named"),
)
SHADOWING = (
    Hostile(
        what="takes-the-name-of-ours", plugin="cpu", group=FEATURES, listed="'cpu' is a plugin of"
    ),
    Hostile(what="same-name-one", plugin="twice", named="'twice' is provided more than once"),
    Hostile(
        what="same-name-two",
        plugin="twice",
        group="ascend_run.platforms",
        named="'twice' is provided more than once",
    ),
)
METADATA = (
    _metadata("no-metadata", {"METADATA": None}, "it has no Name"),
    _metadata("no-name", {"METADATA": _NO_NAME}, "it has no Name"),
    _metadata("not-utf8", {"METADATA": b"Name: \xff\xfe\n"}, "UnicodeDecodeError"),
    _metadata(
        "malformed-entry-points",
        {"entry_points.txt": b"[ascend_run.plugins]\nno equals sign here\n"},
        "hostile-malformed-entry-points: its entry points cannot be read",
    ),
    _metadata(
        "another-distributions-name",
        {"METADATA": GOOD_INFO.format(name="nobody-has-this-name").encode()},
        "nobody-has-this-name: its entry points cannot be read",
    ),
    _metadata(
        "escapes-in-a-name",
        {"entry_points.txt": b"[ascend_run.plugins]\n\x1b[31mred = a:B\n"},
        "has an invalid name",
    ),
    Hostile(what="huge-metadata", files={"METADATA": _HUGE}),
    Hostile(
        what="five-thousand-plugins",
        plugin="p4999",
        files={"entry_points.txt": b"[ascend_run.plugins]\n" + _MANY},
        named="No module named 'nowhere'",
    ),
    Hostile(
        what="no-version",
        files={"METADATA": b"Metadata-Version: 2.1\nName: hostile-no-version\n"},
    ),
)
EVERY = (*AT_IMPORT, *DECLARED, *CLASSES, *SHADOWING, *METADATA)

CYCLE = {
    "first-of-a-cycle": "after=('second-of-a-cycle',)",
    "second-of-a-cycle": "requires=('first-of-a-cycle',), after=('first-of-a-cycle',)",
}
"""Two more whose order is a cycle; each is valid by itself."""


def install_cycle(folder: Path) -> None:
    for name, manifest in CYCLE.items():
        module = f"hostile_{name.replace('-', '_')}"
        points = {FEATURES: {name: f"{module}:Plugin"}}
        source = CANARY + plugin_source(name, manifest)
        make_distribution(folder, f"hostile-{name}", points, {f"{module}.py": source})
