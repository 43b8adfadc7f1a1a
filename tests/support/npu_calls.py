"""Checks every call of an NPU operator in a test, in any process.

A call must bind to the schema of the release that the reference operators follow, and its signature
must be in the record of calls: those that torch_npu's meta kernels accept, which the test of
releases also checks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from ascend_run.plugins.platforms.npu.proof.binding import problems_of
from ascend_run.plugins.platforms.npu.proof.calls import Call
from ascend_run.plugins.platforms.npu.proof.probe import known_calls
from ascend_run.plugins.platforms.npu.proof.recording import Recorder, install, recorded_calls
from ascend_run.plugins.platforms.npu.proof.releases import REFERENCE, releases


class UnprovenCall(Exception):
    """A call that torch_npu rejects, or that is not in the record."""


@functools.cache
def known_forms() -> frozenset[str]:
    return frozenset(form for call in known_calls().values() for form in call.forms())


def check(call: Call) -> None:
    """Check a call.

    Raises:
        UnprovenCall: If the schema or the record does not have it.
    """
    problems = problems_of(call, releases().overloads(call.operator, REFERENCE))
    if problems:
        raise UnprovenCall(f"torch_npu {REFERENCE}: {call.operator} {', '.join(problems)}")
    if new := sorted(call.forms() - known_forms()):
        raise UnprovenCall(
            f"{'; '.join(new)}: in no entry of tests/plugins/platforms/npu/calls; add one and run "
            "scripts/npu_schemas.py"
        )


@functools.cache
def check_from_now_on() -> Recorder:
    """Check calls in this process from now on; for ranks that live as long as the session."""
    return install(check)[0]


@pytest.fixture
def npu_calls() -> Iterator[Recorder]:
    """Yield a recorder of a test's calls, each checked before it runs.

    ``recorder.calls`` counts them by description.
    """
    from tests.plugins.platforms.npu.reference import define_reference_operators

    define_reference_operators()
    with recorded_calls(check) as recorder:
        yield recorder
