"""The order of copies on side streams, with streams that defer work until they are waited for."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.transfer.stream_copier import StreamCopier
from tests.support.fake_streams import FakeStreams


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def copier(streams: FakeStreams) -> StreamCopier:
    return StreamCopier(streams, pin=False)  # pinning needs a device


def test_a_copy_overlaps_with_computation_and_is_complete_after_wait(
    copier: StreamCopier, streams: FakeStreams
) -> None:
    source = torch.zeros(4, requires_grad=True)
    # The computation that fills the tensor is queued, not run.
    streams.default.queue.append(lambda: source.detach().fill_(1.0))
    host = copier.to_host(source)
    assert not host.requires_grad
    host.fill_(-1.0)
    copier.wait_host()
    assert host.eq(-1.0).all()  # the host has not waited
    streams.default.queue.append(lambda: source.detach().fill_(2.0))  # reused memory
    streams.default.run()
    assert host.eq(1.0).all()


def test_a_copy_goes_to_given_memory_after_what_is_queued(
    copier: StreamCopier, streams: FakeStreams
) -> None:
    source, host = torch.zeros(4), torch.full((4,), -1.0)
    streams.default.queue.append(lambda: source.fill_(1.0))
    assert copier.to_host(source, host) is host
    copier.wait_host()
    assert host.eq(-1.0).all()  # the host has not waited
    streams.default.run()
    assert host.eq(1.0).all()


def test_it_comes_back_after_it_has_left_and_before_it_is_read(
    copier: StreamCopier, streams: FakeStreams
) -> None:
    host = copier.to_host(torch.full((4,), 3.0))
    out, read = torch.zeros(4), []
    copier.to_device(host, out)
    streams.default.queue.append(lambda: read.append(out.clone()))
    streams.default.run()
    assert read[0].eq(0.0).all()  # the computation has not waited
    copier.wait_device()
    streams.default.queue.append(lambda: read.append(out.clone()))
    streams.default.run()
    assert read[1].eq(3.0).all()


def test_memory_that_the_computation_still_uses_is_not_overwritten(
    copier: StreamCopier, streams: FakeStreams
) -> None:
    host, out, read = torch.full((4,), 3.0), torch.ones(4), []
    streams.default.queue.append(lambda: read.append(out.clone()))  # queued before the copy
    copier.to_device(host, out)
    copier.wait_device()
    streams.default.run()
    assert read[0].eq(1.0).all()
    assert out.eq(3.0).all()
