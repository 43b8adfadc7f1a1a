"""On a device, a case of more ranks than there are devices is skipped with the reason, unless ranks
share them."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import Numerics
from ascend_run.testing import gloo_on_device
from ascend_run.testing import parity as module
from ascend_run.testing.gloo_on_device import SHARED_VARIABLE, local_rank
from ascend_run.testing.parity import Case, Parity, require_devices
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.support.lacking import lacking

NO_GPU = "platform cuda: rank 1 of this machine has no GPU; torch sees 1"
NPU_ALONE = "'npu-kernels' does not run on platform 'cuda'"


class Ran(Exception):
    """The trial came as far as the ranks."""


class NoRanks:
    """A pool that starts none."""

    def run(self, *args: Any, **options: Any) -> list[Any]:
        raise Ran


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, "cuda")
    monkeypatch.setattr(module, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_more_ranks_than_devices_are_skipped_with_the_reason() -> None:
    reason = "2 ranks on platform cuda need as many devices, not 1"
    with pytest.raises(pytest.skip.Exception, match=reason):
        require_devices(2)
    require_devices(1)


@pytest.mark.usefixtures("one_gpu")
def test_a_trial_that_names_the_cpu_itself_is_not() -> None:
    require_devices(4, "cpu")


def test_without_a_device_nothing_is_skipped_so_that_the_trial_can_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, "cuda")
    monkeypatch.setattr(module, "device_count", lambda: 0)
    require_devices(2)


def test_on_the_cpu_no_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    require_devices(8)


@pytest.mark.usefixtures("one_gpu")
def test_parity_asks_before_it_starts_ranks() -> None:
    parity = Parity(NoRanks(), lambda _: Numerics.BITWISE)  # type: ignore[arg-type]
    with pytest.raises(pytest.skip.Exception, match="2 ranks"):
        parity.outcomes(Case(plugins=("any",), layout={"cp": 2}))
    with pytest.raises(Ran):
        parity.outcomes(Case(plugins=("any",)))


@pytest.mark.parametrize(
    ("platform", "shared", "devices", "expected"),
    [
        ("cuda", "1", 1, [0, 0, 0]),
        ("cuda", "1", 2, [0, 1, 0]),
        ("cuda", "1", 0, [0, 1, 2]),  # the platform then says which of them it has no device for
        ("cuda", "", 1, [0, 1, 2]),
        ("cpu", "1", 1, [0, 1, 2]),
    ],
)
def test_ranks_share_the_devices_that_there_are_if_they_may(
    monkeypatch: pytest.MonkeyPatch, platform: str, shared: str, devices: int, expected: list[int]
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, platform)
    monkeypatch.setenv(SHARED_VARIABLE, shared)
    monkeypatch.setattr(gloo_on_device, "device_count", lambda: devices)
    assert [local_rank(rank) for rank in range(3)] == expected


@pytest.mark.usefixtures("one_gpu")
def test_cases_of_ranks_that_share_a_device_are_not_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    try:
        require_devices(4)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"skipped: {skipped}")


@pytest.mark.parametrize(
    ("message", "platform", "reason"),
    [
        (f"PoolError: rank 1: PlatformError: {NO_GPU}; start fewer", "cuda", NO_GPU),
        (f"PoolError: rank 1: PlatformError: {NO_GPU}; start fewer", "cpu", None),
        (NO_GPU.replace("sees 1", "sees 0"), "cuda", None),
        (f"cannot enable this set:\n  {NPU_ALONE}; it runs on: cpu", "cuda", NPU_ALONE),
        (NPU_ALONE.replace("cuda", "npu"), "npu", None),
        ("'gmm' does not run on platform 'cuda'", "cuda", None),
    ],
)
def test_only_what_machine_or_platform_lack_is_skipped(
    message: str, platform: str, reason: str | None
) -> None:
    assert lacking(message, platform) == reason
