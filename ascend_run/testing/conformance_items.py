"""Collect the conformance checks of the plugins on the command line as pytest items."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from .conformance import CHECKS, Check, Means, Subject, Verdict
from .pytest_plugin import shared_pool
from .runtime import load_runtime


def configure(config: pytest.Config) -> None:
    """Collect the checks, and nothing else if the command line names plugins but no path.

    If a project names its plugin in ``addopts``, the checks are added to the project's tests.
    """
    words = map(str, config.invocation_params.args)
    names_plugin = any(word.startswith("--ascend-plugin") for word in words)
    no_path = config.args_source is not pytest.Config.ArgsSource.ARGS
    # Stored as an option, since pytest-xdist passes only options to its workers.
    config.option.ascend_only = getattr(config.option, "ascend_only", names_plugin and no_path)
    if config.option.ascend_only:
        config.args = []
    config.pluginmanager.register(_Checks(config), "ascend-run-conformance")


class CheckFailed(Exception):
    """A plugin fails a check; the message is for its author."""


class CheckItem(pytest.Item):
    """One check of one plugin."""

    def __init__(self, *, check: Check, subject: Subject, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.check, self.subject = check, subject
        self.verdict: Verdict | None = None

    def runtest(self) -> None:
        self.verdict = self.check.judge(self.subject)
        self.user_properties.append(("ascend-check", (self.subject.name, self.check.code)))
        if self.verdict.problems:
            raise CheckFailed(self.check.message(self.subject.name, self.verdict))
        if self.verdict.not_applicable:
            self.user_properties.append(("does-not-apply", self.verdict.not_applicable))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CheckFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.check.code} {self.subject.name}"


class _Checks:
    """Adds the items, and reports at the end which checks did not apply."""

    def __init__(self, config: pytest.Config) -> None:
        settings = dict(_setting(text) for text in config.getoption("--ascend-set"))
        self.names: list[str] = list(dict.fromkeys(config.getoption("--ascend-plugin")))
        timeout: float = config.getoption("--ascend-timeout")
        if not timeout > 0:
            raise pytest.UsageError(f"--ascend-timeout {timeout:g}: expected seconds above 0")
        self.means = Means(load_runtime(), lambda: shared_pool(config), settings, timeout)

    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        for name in self.names:
            subject = Subject(name, self.means)
            checks: list[pytest.Item] = [
                CheckItem.from_parent(
                    session,
                    name=f"{check.code}[{name}]",
                    nodeid=f"{name}::{check.code}",
                    check=check,
                    subject=subject,
                )
                for check in CHECKS
            ]
            items += checks
            # pytest counts what collectors report, and subtracts what -k deselects.
            report = pytest.CollectReport(name, "passed", None, [*checks])
            session.ihook.pytest_collectreport(report=report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reasons = [
            (*properties["ascend-check"], properties["does-not-apply"])
            for report in terminalreporter.stats.get("passed", [])
            if "does-not-apply" in (properties := dict(report.user_properties))
        ]
        if reasons:
            terminalreporter.section("checks that do not apply")
            for name, code, reason in reasons:
                terminalreporter.line(f"{code} {name}: {reason}")


def _setting(text: str) -> tuple[str, object]:
    """Parse ``plugins.x.size=3`` to a key and a TOML value; a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise pytest.UsageError(f"--ascend-set {text}: expected KEY=VALUE")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value
