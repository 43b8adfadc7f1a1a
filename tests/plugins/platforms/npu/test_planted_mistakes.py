"""Mutations of calls of NPU operators, one at a time: the tests detect every one.

A mutation changes the arguments of one operator, as if its function in ``operators`` were wrong.
Each names the first check that detects it: the schema (of the call as written), the limits in the
operator's documentation (enforced by the reference), meta (shape and dtype of the result against
torch_npu's own), or the arithmetic (against the formula, forward and every gradient).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.plugins.platforms.npu.attention import FusedNpuAttention
from ascend_run.plugins.platforms.npu.platform_ops import NpuGroups, platform_ops
from ascend_run.plugins.platforms.npu.proof.binding import problems_of
from ascend_run.plugins.platforms.npu.proof.calls import Call
from ascend_run.plugins.platforms.npu.proof.meta_results import describe
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
from ascend_run.plugins.platforms.npu.proof.releases import REFERENCE, releases
from tests.support.attention_problems import PROBLEMS, check

from . import test_swapped_memory
from .calls import CALLS
from .reference import RECORD
from .test_platform_ops import assert_same, draw

Arguments = dict[str, Any]
Alter = Callable[[list[Any], Arguments], None]


def check_attention(problem: str) -> Callable[[], None]:
    return lambda: check(FusedNpuAttention(), PROBLEMS[problem])


def check_rms_norm() -> None:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    assert_same(lambda x, w: platform_ops().rms_norm(x, w, 1e-5), formula, draw(5, 2, 8), draw(8))


def check_swiglu() -> None:
    def formula(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x[..., :4]) * x[..., 4:]

    assert_same(platform_ops().swiglu, formula, draw(8, 2, 8))


def check_rotary() -> None:
    angles = torch.cat((draw(5, 4), draw(5, 4)), -1).detach()

    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return x * angles.cos()[:, None, None] + turned * angles.sin()[:, None, None]

    assert_same(
        lambda x: platform_ops().rotary(x, angles.cos(), angles.sin(), False),
        formula,
        draw(5, 2, 3, 8),
    )


def check_groups() -> None:
    x, matrices = draw(6, 4).detach(), draw(3, 4, 4).detach()
    groups = NpuGroups((1, 2, 3), x.device)
    rows = [slice(0, 1), slice(1, 3), slice(3, 6)]
    want = torch.cat([x[some] @ matrices[i] for i, some in enumerate(rows)])
    torch.testing.assert_close(groups.matmul(x, matrices), want, rtol=0, atol=1e-12)
    sums = torch.stack([x[some].T @ x[some] for some in rows])
    torch.testing.assert_close(groups.outer(x, x), sums, rtol=0, atol=1e-12)


def check_adamw() -> None:
    test_swapped_memory.test_steps_of_adamw_are_torchs(torch.float64, 1e-12)


def swapped(first: int, second: int) -> Alter:
    def alter(args: list[Any], kwargs: Arguments) -> None:
        args[first], args[second] = args[second], args[first]

    return alter


def placed(place: int, change: Callable[[Any], Any]) -> Alter:
    def alter(args: list[Any], kwargs: Arguments) -> None:
        args[place] = change(args[place])

    return alter


def named(**changes: Callable[[Any], Any]) -> Alter:
    def alter(args: list[Any], kwargs: Arguments) -> None:
        for name, change in changes.items():
            if kwargs.get(name) is not None:
                kwargs[name] = change(kwargs[name])

    return alter


def without(name: str) -> Alter:
    return lambda args, kwargs: kwargs.__delitem__(name)


def renamed(old: str, new: str) -> Alter:
    return lambda args, kwargs: kwargs.__setitem__(new, kwargs.pop(old))


def by_name(place: int, name: str) -> Alter:
    return lambda args, kwargs: kwargs.__setitem__(name, args.pop(place))


def each_by_name(args: list[Any], kwargs: Arguments) -> None:
    kwargs |= zip(("var", "m", "v"), kwargs.pop("out"), strict=True)


def exchanged(first: str, second: str) -> Alter:
    def alter(args: list[Any], kwargs: Arguments) -> None:
        kwargs[first], kwargs[second] = kwargs[second], kwargs[first]

    return alter


def to_lengths(ends: Any) -> Any:
    """Convert cumulative sums to rows of each group."""
    if isinstance(ends, Tensor):
        return torch.diff(ends, prepend=ends.new_zeros(1))
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@attrs.frozen
class Mistake:
    """One change of one operator's calls."""

    operator: str
    alter: Alter
    proof: Callable[[], None]
    """The function run with it."""
    call: str
    """The entry of ``calls`` whose result is checked."""


SDPA, GRAD = "npu_fusion_attention", "npu_fusion_attention_grad"
FORWARD, BACKWARD = "attention v1 SBH causal forward", "attention v1 SBH causal backward"
PACKED = "attention v1 TND full forward"
NORM, GROUPED, ADAMW = "npu_rms_norm", "npu_grouped_matmul", "npu_apply_adam_w"

MISTAKES: Mapping[str, tuple[Mistake, str]] = {
    "norm: input and weight swapped": (
        Mistake(NORM, swapped(0, 1), check_rms_norm, "rms_norm float32"),
        "meta",
    ),
    "norm: epsilon by another name": (
        Mistake(NORM, by_name(2, "eps"), check_rms_norm, "rms_norm float32"),
        "schema",
    ),
    "norm: epsilon left to the default": (
        Mistake(NORM, lambda a, k: a.pop(), check_rms_norm, "rms_norm float32"),
        "arithmetic",
    ),
    "norm backward: gradient and input swapped": (
        Mistake("npu_rms_norm_backward", swapped(0, 1), check_rms_norm, "rms_norm backward"),
        "arithmetic",
    ),
    "norm backward: without the root mean square": (
        Mistake("npu_rms_norm_backward", lambda a, k: a.pop(), check_rms_norm, "rms_norm backward"),
        "schema",
    ),
    "norm backward: the root mean square, not its reciprocal": (
        Mistake(
            "npu_rms_norm_backward",
            placed(3, Tensor.reciprocal),
            check_rms_norm,
            "rms_norm backward",
        ),
        "arithmetic",
    ),
    "swiglu: of another dimension": (
        Mistake("npu_swiglu", placed(1, lambda dim: 0), check_swiglu, "swiglu"),
        "meta",
    ),
    "swiglu: up before gate": (
        Mistake(
            "npu_swiglu",
            placed(0, lambda x: x.roll(x.shape[-1] // 2, -1)),
            check_swiglu,
            "swiglu",
        ),
        "arithmetic",
    ),
    "swiglu backward: arguments swapped": (
        Mistake("npu_swiglu_backward", swapped(0, 1), check_swiglu, "swiglu backward"),
        "limits",
    ),
    "rotary: interleaved for half": (
        Mistake(
            "npu_rotary_mul", placed(3, lambda mode: "interleave"), check_rotary, "rotary half"
        ),
        "arithmetic",
    ),
    "rotary: a word for the mode that it does not have": (
        Mistake("npu_rotary_mul", placed(3, lambda mode: "halves"), check_rotary, "rotary half"),
        "limits",
    ),
    "rotary: cosines and sines swapped": (
        Mistake("npu_rotary_mul", swapped(1, 2), check_rotary, "rotary half"),
        "arithmetic",
    ),
    "attention: batch first for sequence first": (
        Mistake(SDPA, placed(4, lambda layout: "BSH"), check_attention("causal"), FORWARD),
        "limits",
    ),
    "attention: query and key swapped": (
        Mistake(SDPA, swapped(0, 1), check_attention("multi-head"), FORWARD),
        "limits",
    ),
    "attention: key and value swapped": (
        Mistake(SDPA, swapped(1, 2), check_attention("causal"), FORWARD),
        "arithmetic",
    ),
    "attention: key-value heads for query heads": (
        Mistake(SDPA, placed(3, lambda heads: heads // 2), check_attention("causal"), FORWARD),
        "meta",
    ),
    "attention: the mask's True means seen": (
        Mistake(SDPA, named(atten_mask=Tensor.logical_not), check_attention("causal"), FORWARD),
        "limits",
    ),
    "attention: the mask as floats": (
        Mistake(SDPA, named(atten_mask=Tensor.float), check_attention("causal"), FORWARD),
        "limits",
    ),
    "attention: a band without borders for the diagonal": (
        Mistake(SDPA, named(sparse_mode=lambda mode: 4), check_attention("causal"), FORWARD),
        "arithmetic",
    ),
    "attention: the diagonal for a band": (
        Mistake(
            SDPA,
            named(sparse_mode=lambda mode: 2),
            check_attention("left-window"),
            "attention v1 SBH band forward",
        ),
        "arithmetic",
    ),
    "attention: a mask without its mode": (
        Mistake(SDPA, without("sparse_mode"), check_attention("causal"), FORWARD),
        "limits",
    ),
    "attention: tokens before and after swapped": (
        Mistake(
            SDPA,
            exchanged("pre_tockens", "next_tockens"),
            check_attention("left-window"),
            "attention v1 SBH band forward",
        ),
        "arithmetic",
    ),
    "attention: the spelling of the second version": (
        Mistake(SDPA, renamed("pre_tockens", "pre_tokens"), check_attention("causal"), FORWARD),
        "schema",
    ),
    "attention: without the scale": (
        Mistake(SDPA, without("scale"), check_attention("causal"), FORWARD),
        "arithmetic",
    ),
    "attention: the scale by its name in backward": (
        Mistake(SDPA, renamed("scale", "scale_value"), check_attention("causal"), FORWARD),
        "schema",
    ),
    "attention: lengths of documents for running totals": (
        Mistake(SDPA, named(actual_seq_qlen=to_lengths), check_attention("documents"), PACKED),
        "limits",
    ),
    "attention: packed statistics in the other layout": (
        Mistake(SDPA, without("softmax_layout"), check_attention("documents"), PACKED),
        "limits",
    ),
    "attention backward: largest and total swapped": (
        Mistake(GRAD, exchanged("softmax_max", "softmax_sum"), check_attention("causal"), BACKWARD),
        "arithmetic",
    ),
    "attention backward: statistics once for each query": (
        Mistake(
            GRAD,
            named(softmax_max=lambda t: t[..., :1], softmax_sum=lambda t: t[..., :1]),
            check_attention("causal"),
            BACKWARD,
        ),
        "limits",
    ),
    "attention backward: without the scale": (
        Mistake(GRAD, without("scale_value"), check_attention("causal"), BACKWARD),
        "arithmetic",
    ),
    "attention backward: without the output": (
        Mistake(GRAD, without("attention_in"), check_attention("causal"), BACKWARD),
        "limits",
    ),
    "groups: rows of each for running totals": (
        Mistake(GROUPED, named(group_list=to_lengths), check_groups, "grouped matmul"),
        "limits",
    ),
    "groups: the other kind": (
        Mistake(GROUPED, named(group_type=lambda kind: 2 - kind), check_groups, "grouped matmul"),
        "limits",
    ),
    "groups: a list of rows by the wrong kind of list": (
        Mistake(GROUPED, named(group_list_type=lambda kind: 1), check_groups, "grouped matmul"),
        "limits",
    ),
    "groups: transposed matrices": (
        Mistake(
            GROUPED, placed(1, lambda m: [m[0].transpose(-1, -2)]), check_groups, "grouped matmul"
        ),
        "limits",
    ),
    "groups: a matrix that is in no list": (
        Mistake(GROUPED, placed(1, lambda m: m[0]), check_groups, "grouped matmul"),
        "schema",
    ),
    "groups: several outputs": (
        Mistake(GROUPED, named(split_item=lambda item: 0), check_groups, "grouped matmul"),
        "limits",
    ),
    "AdamW: what it writes, by names of their own": (
        Mistake(ADAMW, each_by_name, check_adamw, "AdamW float32"),
        "schema",
    ),
    "AdamW: moments swapped": (
        Mistake(ADAMW, named(out=lambda o: [o[0], o[2], o[1]]), check_adamw, "AdamW float32"),
        "arithmetic",
    ),
    "AdamW: powers of the decay rates swapped": (
        Mistake(ADAMW, swapped(0, 1), check_adamw, "AdamW float32"),
        "arithmetic",
    ),
}


OBJECTIONS = (AssertionError, IndexError, KeyError, RuntimeError, ValueError)


class Refused(Exception):
    """A schema rejects a call."""


class Mistaken:
    """``torch.ops.npu`` as the mutated code calls it."""

    def __init__(self, operators: Any, mistake: Mistake) -> None:
        self._operators, self._mistake = operators, mistake

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        if name == self._mistake.operator:
            operator = MistakenOperator(operator, self._mistake.alter)
        setattr(self, name, operator)  # torch's C++ looks it up without a reference, as of Recorder
        return operator


class MistakenOperator:
    """One operator with mutated calls, and its overloads."""

    def __init__(self, operator: Any, alter: Alter) -> None:
        self._operator, self._alter = operator, alter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args]
        self._alter(given, kwargs)
        return self._operator(*given, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def refuse(call: Call) -> None:
    if problems := problems_of(call, releases().overloads(call.operator, REFERENCE)):
        raise Refused(", ".join(problems))


@contextmanager
def planted(mistake: Mistake | None) -> Iterator[None]:
    with recorded_calls(refuse) as recorder:
        operators: Any = torch.ops
        if mistake is not None:
            operators.npu = Mistaken(recorder, mistake)
        yield


def objects(mistake: Mistake | None, proof: Callable[[], None], call: str) -> str | None:
    """Return the first check that fails."""
    with planted(mistake):
        try:
            result = describe(CALLS[call](torch.device("cpu")))
        except Refused:
            return "schema"
        except OBJECTIONS:
            return "limits"
        if json.loads(json.dumps(result)) != RECORD["meta"][call]:
            return "meta"
        try:
            proof()
        except Refused:
            return "schema"
        except OBJECTIONS:
            return "arithmetic"
    return None


@pytest.fixture
def checked_calls() -> None:
    """The checks below validate the mutated calls themselves."""


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_found(name: str) -> None:
    mistake, layer = MISTAKES[name]
    assert objects(mistake, mistake.proof, mistake.call) == layer


def test_nothing_is_found_where_nothing_is_planted() -> None:
    for mistake, _ in MISTAKES.values():
        assert objects(None, mistake.proof, mistake.call) is None


def test_the_page_gives_their_number() -> None:
    page = Path(__file__).parents[4] / "docs/npu-proof.md"
    assert f"plants {len(MISTAKES)} mistakes" in page.read_text(encoding="utf-8")
