"""For how long a layer waits for its copies, against sums done by hand."""

from __future__ import annotations

from typing import Final

from ascend_run.plugins.memory.adaptive_recompute.waiting import Channel

GIB: Final = 1 << 30
PARTS: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
SPENT: Final = {"": 100, **dict(zip(PARTS, (5, 40, 5, 45), strict=True))}
MOVED: Final = dict.fromkeys(PARTS, GIB)
"""One GiB each: a channel's numbers are the times of their copies."""


def waited(to_host: int, to_device: int, *swapped: str, beside: bool = True) -> int:
    channel = Channel(to_host=to_host, to_device=to_device, is_overlapped=beside)
    return channel.waited(SPENT, MOVED, swapped)


def test_copies_behind_the_rest_of_the_layer_are_not_waited_for() -> None:
    assert waited(55, 100, "self_attention") == 0  # from 45 to 100
    assert waited(56, 100, "self_attention") == 1
    assert waited(10, 103, "self_attention") == 3  # the backward of another layer has 100


def test_copies_of_several_parts_come_one_after_the_other() -> None:
    assert waited(40, 30, "input_layernorm", "self_attention") == 0  # 5 to 45 to 85
    assert waited(40, 60, "input_layernorm", "self_attention") == 2 * 60 - 100
    assert waited(40, 30, "self_attention", "mlp") == 40 - 5  # the last begins at 95


def test_copies_that_are_not_overlapped_are_waited_for() -> None:
    assert waited(7, 11, "self_attention", "mlp", beside=False) == 2 * (7 + 11)
