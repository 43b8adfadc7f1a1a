"""Every field of the installed Megatron's config does something here, or is refused by name.

The fields are read from Megatron's source, so that one that a newer version adds fails the first
test; who reads them is seen in tiny runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, get_args

import pytest

from ascend_run.core.config.megatron_fields import MegatronField, megatron_fields
from ascend_run.plugin_api import ConfigError
from ascend_run.plugin_api.error_text import show
from ascend_run.prepare.config.unsupported import (
    CHOICES,
    DEFAULT_ONLY,
    NEVER,
    OWN_DEFAULTS,
    refused_because,
)
from ascend_run.prepare.config.value_types import TypeMismatch, structure
from ascend_run.testing.models import DENSE, MOE, trial_layout
from ascend_run.testing.pool import GlooPool
from scripts.field_readers import READERS
from tests.support.config_reads import Reads, reads_of, reads_with_a_router_of_megatron
from tests.support.latent_models import MODEL as LATENT
from tests.support.tiny_configs import SMALLEST, build

# -- every field has its place ----------------------------------------------------------------


def test_each_field_of_megatron_is_read_or_refused_and_never_both() -> None:
    refused = {name for name, field in megatron_fields().items() if refused_because(field)}
    assert refused.isdisjoint(READERS)
    assert refused | READERS.keys() == megatron_fields().keys()


def test_the_tables_name_only_fields_that_exist_and_each_once() -> None:
    named = [*NEVER, *DEFAULT_ONLY, *READERS]
    assert {*named, *CHOICES, *OWN_DEFAULTS} <= megatron_fields().keys()
    assert len(named) == len({*named})


# -- who reads them ---------------------------------------------------------------------------

_RECOMPUTED: Final = {"model.recompute_granularity": "full", "model.recompute_num_layers": 1}
_SHARED: Final = {
    "model.moe_shared_expert_intermediate_size": 32,
    "model.moe_shared_expert_gate": True,
    "model.moe_shared_expert_overlap": True,
}
RUNS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "dense, one rank": (1, DENSE),
    "windows": (1, {**DENSE, "model.window_size": [4, 0], "model.window_attn_skip_freq": 2}),
    "recomputed, tp": (
        2,
        {**DENSE, **_RECOMPUTED, "model.recompute_method": "block", **trial_layout({"tp": 2})},
    ),
    "distributed activations": (
        2,
        {
            **DENSE,
            **_RECOMPUTED,
            "model.recompute_method": "uniform",
            "model.distribute_saved_activations": True,
            "parallel.tensor_model_parallel_size": 2,
        },
    ),
    "experts, ep": (
        2,
        {
            **MOE,
            **_SHARED,
            "model.recompute_granularity": "selective",
            "model.moe_expert_capacity_factor": 1.5,
            **trial_layout({"ep": 2}),
        },
    ),
    "latent attention, experts, mtp": (1, {**LATENT, "model.mtp_num_layers": 1}),
    "chunks, pp": (2, {**DENSE, "model.num_layers": 4, **trial_layout({"pp": 2, "vpp": 2})}),
    "pp": (2, {**DENSE, **trial_layout({"pp": 2})}),
}
ROUTERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "groups of experts": {
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
    },
}


ReadsIn: TypeAlias = Callable[[str], Reads]


@pytest.fixture(scope="module")
def reads_in(gloo_pool: GlooPool) -> ReadsIn:
    """What the ranks of one of these runs read; each run is made once."""

    @functools.cache
    def reads_in(name: str) -> Reads:
        if name in ROUTERS:
            router = ROUTERS[name]
            ranks = gloo_pool.run(reads_with_a_router_of_megatron, 1, MOE, router, timeout=100)
        else:
            world_size, values = RUNS[name]
            ranks = gloo_pool.run(reads_of, world_size, values, timeout=100)
        return frozenset().union(*ranks)

    return reads_in


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize("name", [*RUNS, *ROUTERS])
def test_every_run_reads_the_fields_of_any_model(reads_in: ReadsIn, name: str) -> None:
    assert {("num_layers", "megatron.core.transformer.transformer_block")} <= reads_in(name)


@pytest.mark.parametrize("module", sorted({*READERS.values()}))
def test_a_module_is_seen_to_read_the_fields_that_it_is_named_for(
    reads_in: ReadsIn, module: str
) -> None:
    named = {name for name, reader in READERS.items() if reader == module}
    runs = map(reads_in, (*RUNS, *ROUTERS))
    assert named <= {name for reads in runs for name, reader in reads if reader == module}


# -- the others are refused -------------------------------------------------------------------


def _other(field: MegatronField) -> Any:
    """A value of the field's type that is not its default."""
    members = get_args(field.type) or (field.type,)
    words = [word for member in (*members, field.type) for word in get_args(member)]
    for value in (*words, True, False, 7, "another", [7], ["another"], {"some": 7}):
        try:
            if structure(value, field.type) != field.default:
                return value
        except TypeMismatch:
            continue
    raise AssertionError(f"no value of {field.annotation}")


def _built_with(**values: Any) -> None:
    smallest = [line.replace(" ", "") for line in SMALLEST.split("\n") if "=" in line]
    fields = megatron_fields()
    chosen = [
        f"{fields[name].section}.{name}={value if isinstance(value, str) else show(value)}"
        for name, value in values.items()
    ]
    build(None, *(f"model.{line}" for line in smallest), *chosen)


@pytest.mark.parametrize(
    "name", [name for name, field in megatron_fields().items() if refused_because(field)]
)
def test_a_refused_field_is_named_with_the_reason(name: str) -> None:
    field = megatron_fields()[name]
    with pytest.raises(ConfigError) as told:
        _built_with(**{name: _other(field)})
    (problem,) = told.value.problems
    assert re.match(rf"{field.section}\.{name}(=| cannot be set)", problem)
    assert str(refused_because(field)) in problem


def test_a_refused_field_may_be_left_at_its_default() -> None:
    _built_with(**{name: megatron_fields()[name].default for name in DEFAULT_ONLY})
