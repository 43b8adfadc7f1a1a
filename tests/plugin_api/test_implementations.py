"""What a plugin owns follows from the provider hooks that it implements."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import Claim
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import claims_of, implementations
from tests.support.fake_plugins import platform, plugin

PROVIDERS = {p.name: p.claim for p in hook_points().values() if p.claim}


def result(self: Any) -> None: ...


@pytest.mark.parametrize("hook", PROVIDERS)
def test_a_plugin_with_a_provider_hook_makes_its_claim(hook: str) -> None:
    assert claims_of(plugin("one", {hook: result})) == (PROVIDERS[hook],)


def test_what_the_manifest_claims_comes_after_what_hooks_claim() -> None:
    both = plugin("one", {"ascend_task": result}, claims=(Claim.DATASET,))
    assert claims_of(both) == (Claim.TASK, Claim.DATASET)
    assert claims_of(both()) == claims_of(both)


def test_claims_of_an_instance_evaluate_no_property_of_it() -> None:
    class Lazy(plugin("lazy", {"ascend_task": result})):  # type: ignore[misc]
        @property
        def loaded(self) -> None:
            raise AssertionError("claims are read from the class")

    assert claims_of(Lazy()) == (Claim.TASK,)


def test_a_class_is_read_once() -> None:
    one = plugin("one", {"ascend_task": result})
    assert implementations(one()) is implementations(one)


def test_an_inherited_hook_makes_its_claim_and_a_wrapper_makes_none() -> None:
    base = plugin("base", {"ascend_experts": result, "ascend_layer": result})
    assert claims_of(type("Child", (base,), {})) == (Claim.EXPERTS,)


def test_a_platform_claims_no_seam_that_it_serves_as_the_default() -> None:
    hooks = {"ascend_attention_kernel": result, "ascend_platform_ops": result}
    assert claims_of(platform("cpu", hooks)) == (Claim.PLATFORM,)
    assert {*claims_of(plugin("one", hooks))} == {Claim.ATTENTION_KERNEL, Claim.PLATFORM_OPS}
