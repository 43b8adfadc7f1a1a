"""A run is rejected once if its attention kernel does not declare a needed feature."""

from __future__ import annotations

from ascend_run.core.config.attention_needs import AttentionPart, attention_problems, declared_by
from ascend_run.plugin_api import AttentionFeatures
from tests.support.tiny_configs import config_with

EVERYTHING = AttentionFeatures.all_but()
NOTHING = AttentionFeatures()


PLAIN = config_with(model__attention_dropout=0)
"""Megatron's own default is 0.1."""


def part(plugin: str, can: AttentionFeatures | None, *needs: str) -> AttentionPart:
    return AttentionPart(
        plugin=plugin, can=can, needs=AttentionFeatures(**dict.fromkeys(needs, True))
    )


def test_a_run_that_asks_for_nothing_runs_on_any_kernel() -> None:
    assert list(attention_problems(PLAIN, [part("plain", NOTHING)])) == []


def test_what_an_option_asks_is_refused_with_the_option_and_its_value() -> None:
    config = config_with(model__window_size=[4, 0], model__attention_dropout=0.5)
    parts = [part("plain", AttentionFeatures(dropout=True)), part("around", EVERYTHING)]
    assert list(attention_problems(config, parts)) == [
        (
            "the attention of 'plain' does not do 'window', which model.window_size=[4, 0] needs; "
            "leave the option out, or that plugin"
        )
    ]
    assert list(attention_problems(config, [part("kernel", EVERYTHING)])) == []


def test_what_a_plugin_asks_is_asked_of_the_parts_inside_of_it() -> None:
    slopes = part("slopes", EVERYTHING, "bias")
    exchange = part("exchange", AttentionFeatures.all_but("bias"))
    inside = [part("kernel", EVERYTHING), slopes, exchange]
    outside = [part("kernel", EVERYTHING), exchange, slopes]
    assert list(attention_problems(PLAIN, inside)) == []
    (problem,) = attention_problems(PLAIN, outside)
    assert problem == (
        "the attention of 'exchange' does not do 'bias', which 'slopes' needs; leave out one of "
        "the two"
    )


def test_an_outer_kernel_is_not_blamed_for_the_one_inside_it() -> None:
    config = config_with(model__attention_dropout=0.5)
    parts = [part("inner", NOTHING), part("outer", NOTHING)]
    (problem,) = attention_problems(config, parts)
    assert "'inner'" in problem


def test_of_a_part_that_says_nothing_nothing_is_known() -> None:
    config = config_with(model__attention_dropout=0.5)
    assert list(attention_problems(config, [part("silent", None)])) == []


def test_a_kernel_that_declares_nothing_can_nothing_that_is_special() -> None:
    assert declared_by(object()) == NOTHING


def test_two_kernels_can_together_what_both_can() -> None:
    some = AttentionFeatures(window=True, sinks=True)
    assert some & AttentionFeatures.all_but("sinks") == AttentionFeatures(window=True)
