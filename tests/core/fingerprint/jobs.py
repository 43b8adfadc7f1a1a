"""Jobs for gloo ranks: the parameter hash of a model, and the sample that it stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import structlog
import torch

from tests.core.checkpoint.model_jobs import VOCABULARY, Case, trained
from tests.support.small_runs import training


def trained_hash(case: Case, steps: int) -> str:
    """After steps whose outcome does not depend on the layout."""
    from ascend_run.core.train.fingerprints import StepFingerprints

    with trained(case, steps) as (layout, bundle, _):
        context: Any = SimpleNamespace(
            config=SimpleNamespace(model=SimpleNamespace(vocab_size=VOCABULARY)),
            layout=layout,
            device=SimpleNamespace(torch_device=torch.device("cpu")),
            step=steps,
            consumed_samples=0,
        )
        fingerprints = StepFingerprints(context, bundle, structlog.get_logger())
        fingerprints.add(None)
        (entry,) = fingerprints.take()
        return str(entry["parameters"])


def untrained_hash(values: Mapping[str, Any], enable: Sequence[str] = ()) -> str:
    """Of a run's model as it begins, built as a run builds it."""
    from ascend_run.core.train.fingerprints import StepFingerprints

    with training(values, enable) as run:
        fingerprints = StepFingerprints(run.context, run.bundle, structlog.get_logger())
        fingerprints.add(None)
        (entry,) = fingerprints.take()
        return str(entry["parameters"])


def hash_by_hand(values: Mapping[str, Any]) -> tuple[str, str]:
    """The parameter hash of one rank's model from its state_dict alone, in Python's integers; and
    as a run has it."""
    from ascend_run.core.train.fingerprints import StepFingerprints
    from ascend_run.ops.hashing import sampled_places
    from tests.ops.test_hashing import MASK, by_hand

    with training(values) as run:
        run.step()
        fingerprints = StepFingerprints(run.context, run.bundle, structlog.get_logger())
        fingerprints.add(None)
        (entry,) = fingerprints.take()
        total = 0
        for name, tensor in run.parameters.items():
            rows = values["model.vocab_size"] if "embed" in name or "output" in name else None
            flat = tensor[:rows].reshape(-1).view(torch.int32).tolist()
            key = _key(name)
            for place in sampled_places(name, tensor[:rows].shape).tolist():
                salt = by_hand(by_hand(place) ^ key)
                total += by_hand((flat[place] & MASK) ^ salt)
        return f"{total & MASK:016x}", str(entry["parameters"])


def _key(name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def flips(values: Mapping[str, Any]) -> dict[str, bool]:
    """Each parameter -> whether the hash saw its last sampled element's lowest bit flip."""
    from ascend_run.core.train.fingerprints import StepFingerprints
    from ascend_run.ops.hashing import sampled_places

    with training(values) as run:
        fingerprints = StepFingerprints(run.context, run.bundle, structlog.get_logger())

        def now() -> str:
            fingerprints.add(None)
            return str(fingerprints.take()[0]["parameters"])

        before, seen = now(), {}
        for name, tensor in run.parameters.items():
            rows = values["model.vocab_size"] if "embed" in name or "output" in name else None
            place = sampled_places(name, tensor[:rows].shape)[-1]
            bits = tensor.view(-1).view(torch.int32)
            bits[place] ^= 1
            seen[name] = now() != before
            bits[place] ^= 1
            assert now() == before, name
        return seen
