"""Communication buffers of process groups, sized by the largest message of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api import (
    CommOptions,
    Communication,
    FrozenMapping,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    hookimpl,
)

SMALL_MB: Final = 10
"""For groups that exchange a few numbers. Source: MindSpeed's adaptive sizes."""
_MIB: Final = 2**20
_BY_DEFAULT: Final = ("dp", "dp_cp", "expt_dp", "embd", "pos_embd")
"""Groups of gradients and parameters, which are sent once in a step, in messages of any size."""
_ROUTED: Final = ("ep", "expt_tp")
"""Groups whose messages depend on how many tokens a rank's experts get."""
_TOKENS: Final = ("all_to_all", "all_gather", "reduce_scatter")


@attrs.frozen(kw_only=True)
class CommBufferAutoConfig:
    """Options, set by ``plugins.comm-buffer-auto.<field>=<value>``."""

    sizes: Mapping[str, int] = attrs.field(factory=dict, converter=FrozenMapping)
    """Process group -> buffer, in place of the computed one, as in ``{tp = 64}``. Unit: MiB."""
    max_mb: int = attrs.field(default=200, validator=attrs.validators.ge(1))
    """Largest computed buffer, by default that of hccl; larger messages are sent in slices. Unit:
    MiB."""
    expert_imbalance: float = attrs.field(default=2.0, validator=attrs.validators.ge(1.0))
    """Tokens that the experts of one rank get, as a multiple of the mean over ranks."""


@attrs.frozen(kw_only=True)
class Message:
    """The largest message of a process group."""

    operation: str
    nbytes: float
    """Of the larger one of a rank's input and output."""
    why: str

    @property
    def times(self) -> int:
        """An all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.operation == "all_reduce" else 1

    @property
    def buffer_mb(self) -> int:
        """Two bytes for every ``2**20`` elements begun, in half precision."""
        return 2 * math.ceil(self.nbytes / 2 / _MIB) * self.times

    def __str__(self) -> str:
        return f"{self.operation} of {self.nbytes / _MIB:.2f} MiB: {self.why}"


class CommBufferAuto:
    """Give each process group a communication buffer of the size of its largest message.

    Cost: slices of messages larger than ``max_mb``. It saves buffers where messages are smaller
    than the backend's default (200 MB of hccl). Numerics: bitwise neutral. Source: MindSpeed's
    ``--hccl-group-buffer-adaptive``.
    """

    manifest = Manifest(
        name="comm-buffer-auto",
        summary="size the communication buffer of each process group by its largest message",
        exercised_by="train with it on an NPU: only hccl has a buffer for each group",
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.EMULATED, "cuda": Support.UNVERIFIED, "npu": Support.UNVERIFIED},
        level=3,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--hccl-group-buffer-adaptive"),
            LegacyFlag(
                flag="--hccl-ep-group-buffer-adaptive-factor",
                key="plugins.comm-buffer-auto.expert_imbalance",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/hccl-group-buffer-set.md",
    )
    config_class = CommBufferAutoConfig

    def __init__(self, config: CommBufferAutoConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self) -> Sequence[str]:
        return [
            f"comm-buffer-auto: plugins.comm-buffer-auto.sizes has {name}={size}; a buffer takes "
            "at least 1 MiB"
            for name, size in self.config.sizes.items()
            if size < 1
        ]

    @hookimpl
    def ascend_comm_options(
        self, config: RunConfig, layout: Layout, communication: Sequence[Communication]
    ) -> Mapping[str, CommOptions]:
        padded = config.model.moe_pad_expert_input_to_capacity
        imbalance = 1.0 if padded else self.config.expert_imbalance
        small = CommOptions(buffer_mb=SMALL_MB, why="a few numbers")
        found = dict.fromkeys(groups_of_few_numbers(layout), small)
        for name, message in largest_messages(layout, communication, imbalance).items():
            size, most = message.buffer_mb, self.config.max_mb
            why = str(message) if size <= most else f"{message}; in slices of at most {most} MiB"
            found[name] = CommOptions(buffer_mb=min(size, most), why=why)
        for name, size in self.config.sizes.items():
            found[name] = CommOptions(buffer_mb=size, why="plugins.comm-buffer-auto.sizes")
        return found


def largest_messages(
    layout: Layout, communication: Sequence[Communication], imbalance: float
) -> dict[str, Message]:
    """Return process group -> the message that needs the largest buffer.

    Args:
        communication: What a step sends.
        imbalance: Tokens that the experts of one rank get, as a multiple of the mean over ranks.
    """
    sizes, found = _group_sizes(layout), dict[str, Message]()
    for sent in communication:
        ranks = sizes.get(sent.group, sent.group_size)
        if ranks < 2 or sent.group in _BY_DEFAULT or not sent.calls:
            continue
        nbytes = sent.largest_bytes or sent.sent_bytes / sent.calls
        nbytes *= ranks if sent.operation == "all_gather" else 1
        if sent.group in _ROUTED and sent.operation in _TOKENS:
            nbytes *= imbalance
        message = Message(operation=sent.operation, nbytes=nbytes, why=sent.why)
        known = found.get(sent.group, message)
        found[sent.group] = max(known, message, key=lambda one: one.times * one.nbytes)
    return found


def groups_of_few_numbers(layout: Layout) -> Iterator[str]:
    """Yield the groups over which norms, losses and balances of experts are summed."""
    sizes = {
        "mp": layout.tp * layout.pp,
        "tp_cp": layout.tp * layout.cp,
        "tp_dp_cp": layout.tp * layout.dp * layout.cp,
        "tp_ep_pp": layout.expt_tp * layout.ep * layout.pp,
    }
    return (name for name, ranks in sizes.items() if ranks > 1)


def _group_sizes(layout: Layout) -> dict[str, int]:
    """Name of an axis, or of a group over two of them -> ranks."""
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "ep": layout.ep,
        "expt_tp": layout.expt_tp,
        "tp_ep": layout.expt_tp * layout.ep,
        "mp": layout.tp * layout.pp,
    }
