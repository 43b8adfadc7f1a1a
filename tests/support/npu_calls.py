"""The check of every call of an NPU operator while a suite runs, in whichever process.

A call has to bind to the schema of the release that the reference operators follow, and its form
has to be one that stands in the record of calls: those torch_npu's own meta kernels were asked
about, and those are what the test of releases looks at.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from ascend_run.plugins.npu.proof.binding import problems_of
from ascend_run.plugins.npu.proof.calls import Call
from ascend_run.plugins.npu.proof.probe import known_calls
from ascend_run.plugins.npu.proof.recording import Recorder, install, recorded_calls
from ascend_run.plugins.npu.proof.releases import REFERENCE, releases


class UnprovenCall(Exception):
    """A call that torch_npu does not take, or that the record does not know."""


@functools.cache
def known_forms() -> frozenset[str]:
    return frozenset(form for call in known_calls().values() for form in call.forms())


def check(call: Call) -> None:
    """Raise where a call is not proven.

    Raises:
        UnprovenCall: By schema, or by record.
    """
    problems = problems_of(call, releases().overloads(call.operator, REFERENCE))
    if problems:
        raise UnprovenCall(f"torch_npu {REFERENCE}: {call.operator} {', '.join(problems)}")
    if new := sorted(call.forms() - known_forms()):
        raise UnprovenCall(
            f"{'; '.join(new)}: in no entry of tests/plugins/npu/calls; add one and run "
            "tools/npu_schemas.py"
        )


@functools.cache
def check_from_now_on() -> Recorder:
    """In this process, once; for ranks that live as long as the session."""
    return install(check)[0]


@pytest.fixture
def npu_calls() -> Iterator[Recorder]:
    """What a test called, each call checked before it is made.

    ``recorder.calls`` counts them by description.
    """
    from tests.plugins.npu.reference import define_reference_operators

    define_reference_operators()
    with recorded_calls(check) as recorder:
        yield recorder
