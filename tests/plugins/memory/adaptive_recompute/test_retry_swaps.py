"""Steps in which memory runs out while parts are swapped: no bit changes, and a try leaves nothing
behind, in memory or in files."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.transfer.file_copier import FileCopier
from ascend_run.ops.transfer.swap_plan import Link
from ascend_run.plugins.memory.adaptive_recompute import autotuner
from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.support.fake_plugins import plugin
from tests.support.limited_memory import LimitedMemory
from tests.support.small_runs import training

from .test_retry import LEAST, LONG, NAME, Ran, assert_equal, finish, ran

STEPS: Final = 4
MODEL: Final = {**MOE, **LONG, "model.num_layers": 3, "platform": "cpu"}
COPIES: Final = 12
FAST: Final = Link(to_host=1e15, to_device=1e15)
"""What is swapped then takes less time than what is recomputed. Unit: bytes per second."""


@attrs.define
class Watch:
    """Copies to files, and what of them is left before each forward and backward."""

    folder: str
    memory: LimitedMemory = attrs.field(factory=LimitedMemory)
    swapper: Any = None
    copies: list[int] = attrs.field(factory=list)  #: Since the look before.
    left: list[tuple[int, int, int]] = attrs.field(factory=list)
    """Of them the tensors in files, files that are mapped, and copies that are under way."""
    fails_with: int = 0  #: The copy of a try, from 1, in which memory runs out; 0: none.
    _hosts: list[StorageWeakRef] = attrs.field(factory=list)

    def look(self) -> None:
        """Take note of it."""
        gc.collect()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        living = sum(not host.expired() for host in self._hosts)
        under_way = len(self.swapper._leaving) if self.swapper is not None else 0
        self.left.append((living, maps.count(f" {self.folder}/"), under_way))
        self.copies.append(len(self._hosts))
        self._hosts.clear()

    def plugins(self) -> tuple[Any, Any]:
        """Return plugins that limit memory, and look."""

        def wrap(schedule: Any) -> Any:
            def watched(**arguments: Any) -> Any:
                self.look()
                return schedule(**arguments)

            return watched

        return self.memory.plugin(), plugin("watch", {"ascend_schedule": lambda self: wrap})()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See each copy to a file."""
        to_host = FileCopier.to_host

        def send(copier: FileCopier, tensor: Tensor, out: Tensor | None = None) -> Tensor:
            host = to_host(copier, tensor, out)
            self._hosts.append(StorageWeakRef(host.untyped_storage()))
            if len(self._hosts) == self.fails_with:
                self.fails_with = 0
                raise torch.OutOfMemoryError("on purpose")
            return host

        with patch.object(FileCopier, "to_host", send):
            yield


@attrs.define(kw_only=True)
class Tried:
    """A run that has never failed, and one with less memory."""

    plain: Ran
    found: Ran
    limit: float
    copies: list[int]
    left: list[tuple[int, int, int]]


def tried(model: Mapping[str, Any], own: Mapping[str, Any]) -> Tried:
    """Train with memory for half of what layers need not keep; in the last step it also runs out
    while a layer is copied. A rank's job."""
    plain = ran(model, (), float("inf"), STEPS)
    least = ran({**model, **LEAST}, (NAME,), float("inf"), 3)
    watch, found = Watch(own[f"plugins.{NAME}.folder"]), Ran(losses=[], tensors=[])
    memory = watch.memory
    memory.limit = (least.peak + plain.peak) / 2
    fast = patch.object(autotuner, "measured_link", lambda *_: FAST)
    with fast, watch.watching(), training({**model, **own}, (NAME,), *watch.plugins()) as run:
        (tuned,) = (p for p in run.hooks.plugins if p.manifest.name == NAME)
        state: Any = tuned
        watch.swapper = state._tuner._swapper
        for step in range(STEPS):
            watch.fails_with = COPIES if step == STEPS - 1 else 0
            memory.peak, memory.failures = 0, 0
            found.losses.append(run.step_with_events().loss)
            found.failures.append(memory.failures)
        watch.look()
        finish(found, run)
    found.peak, found.begun = memory.peak, memory.begun
    return Tried(plain=plain, found=found, limit=memory.limit, copies=watch.copies, left=watch.left)


def test_a_try_with_swapped_parts_leaves_nothing_and_changes_no_bit(gloo_pool: GlooPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {"retry": True, "profiled_steps": 1, "min_bytes": 2048, "folder": folder}
        own = {f"plugins.{NAME}.{key}": value for key, value in options.items()}
        (ran,) = gloo_pool.run(tried, 1, MODEL, own, timeout=200)
        assert not [*Path(folder).iterdir()]
    found, plain = ran.found, ran.plain
    assert_equal(found, plain)
    assert any(words.startswith("swapped") for words in found.chosen.values())
    assert found.peak <= ran.limit
    assert {*ran.left} == {(0, 0, 0)}
    assert max(found.begun) <= max(plain.begun), "a try has left something behind"
    assert COPIES in ran.copies, "no try failed in a copy"
