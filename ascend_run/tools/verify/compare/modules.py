"""Find the first module that differs, from moments that do not depend on sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs

from ascend_run.tools.verify.capture.moments import Moments
from ascend_run.tools.verify.capture.record import Record

from .verdict import ModuleDeviation

ROOT = "model"
BATCH = "batch"


@attrs.frozen
class Trace:
    """One run's moments over all ranks: key -> micro-batch -> row, in the order of execution."""

    forward: Mapping[str, Mapping[int, Sequence[float]]]
    backward: Mapping[str, Mapping[int, Sequence[float]]]


@attrs.frozen
class Origin:
    """The first module that differs."""

    module: str
    why: str
    suspects: tuple[str, ...] = ()
    order: int = 0
    """In backward: its position in the reference, as in ``backward_orders``."""


def trace(records: Sequence[Record]) -> Trace:
    """Sum the moments of all ranks; chunks in the order of the model."""
    chunks = sorted({chunk for record in records for chunk in record.forward})
    return Trace(
        _merged([_without_copies(r, r.forward) for r in records], chunks),
        _merged([_without_copies(r, r.backward) for r in records], chunks[::-1]),
    )


def _without_copies(
    record: Record, chunks: Mapping[int, Mapping[str, Moments]]
) -> Mapping[int, Mapping[str, Moments]]:
    """Drop the loss on all but one tensor-parallel rank, since it is replicated over them."""
    if record.coordinates["tp"] == 0:
        return chunks
    return {
        chunk: {key: seen for key, seen in keys.items() if not key.startswith(f"{ROOT}|out")}
        for chunk, keys in chunks.items()
    }


def _merged(
    parts: Sequence[Mapping[int, Mapping[str, Moments]]], chunks: Sequence[int]
) -> dict[str, dict[int, list[float]]]:
    total: dict[str, dict[int, list[float]]] = {}
    for chunk, part in itertools.product(chunks, parts):
        for key, moments in part.get(chunk, {}).items():
            rows = total.setdefault(key, {})
            for micro_batch, row in moments.rows.items():
                known = rows.get(micro_batch)
                rows[micro_batch] = (
                    list(row) if known is None else [a + b for a, b in zip(known, row, strict=True)]
                )
    return total


def aligned(candidate: Trace, reference: Trace) -> Trace:
    """Rename the candidate's modules to the reference's names: a plugin's wrapper gets the name of
    the module that it wraps; modules that a plugin adds are left out."""
    known = {key.split("|")[0] for key in reference.forward}
    owners: dict[str, str] = {}
    for key in candidate.forward:
        module = key.split("|")[0]
        name = plain_name(module, known)
        if name is not None and len(module) < len(owners.get(name, module + ".")):
            owners[name] = module
    named = {module: name for name, module in owners.items()}

    def renamed(
        keys: Mapping[str, Mapping[int, Sequence[float]]],
    ) -> dict[str, Mapping[int, Sequence[float]]]:
        found = {}
        for key, rows in keys.items():
            module, _, rest = key.partition("|")
            if module in named:
                found[f"{named[module]}|{rest}"] = rows
        return found

    return Trace(renamed(candidate.forward), renamed(candidate.backward))


def plain_name(module: str, known: set[str]) -> str | None:
    """Return the known name of a module, dropping up to two parts of it that wrappers add."""
    if module in known:
        return module
    words = module.split(".")
    for count in (1, 2):
        for dropped in itertools.combinations(range(len(words)), count):
            name = ".".join(word for i, word in enumerate(words) if i not in dropped)
            if name in known:
                return name
    return None


def first_forward(candidate: Trace, reference: Trace, tolerance: float) -> Origin | None:
    """Return the first module whose output differs although its input does not."""
    for key, rows in candidate.forward.items():
        error = _error(key, rows, reference.forward.get(key), backward=False)
        if error is None or error <= tolerance:
            continue
        module, kind, which = key.split("|")
        if kind == "out":
            return Origin(module if module != ROOT else "loss", "its output differs first")
        if module == ROOT:
            return Origin(BATCH, f"{which} differs")
        maker = _parent(module)
        if maker == ROOT and not which.isdigit():
            maker = which  # such as the rotary tables, which are not a module's output
        return Origin(maker, f"{which} of {module} differs first", (module,))
    return None


def first_backward(candidate: Trace, reference: Trace, tolerance: float) -> Origin | None:
    """Return the first module that computes a wrong gradient from a correct one."""
    keys = list(candidate.backward.items())
    orders = {key: order for order, key in enumerate(reference.backward)}
    for position, (key, rows) in enumerate(keys):
        error = _error(key, rows, reference.backward.get(key), backward=True)
        if error is None or error <= tolerance:
            continue
        order = orders[key]
        # The tensor may be the output of one module and the input of others: take the innermost.
        same = [other for other, theirs in keys[position:] if theirs == rows]
        takers = [other.split("|")[0] for other in same if other.split("|")[1] == "in"]
        module = key.split("|")[0]
        if takers:
            inner = max(takers, key=len)
            others = tuple(name for name in takers if name != inner)
            return Origin(inner, "the gradient at its input differs first", others, order)
        makers = [other.split("|")[0] for other in same]
        maker = _parent(min(makers, key=len)) if ROOT not in makers else ROOT
        if maker == ROOT:  # only the loss is computed outside of modules there
            return Origin(
                "loss", f"the gradient that it passes to {module} differs", (module,), order
            )
        return Origin(
            maker, f"the gradient that it passes to {module} differs first", (module,), order
        )
    return None


def backward_orders(reference: Trace) -> dict[str, int]:
    """Return module -> position of the gradient at its output, in the order of execution."""
    orders: dict[str, int] = {}
    for order, key in enumerate(reference.backward):
        module, kind, _ = key.split("|")
        if kind == "out":
            orders.setdefault(module, order)
    return orders


def deviations(candidate: Trace, reference: Trace) -> tuple[ModuleDeviation, ...]:
    """Return the error of every module's output, in the order of execution."""
    forward = _by_module(candidate.forward, reference.forward, backward=False)
    backward = _by_module(candidate.backward, reference.backward, backward=True)
    return tuple(
        ModuleDeviation(module=module, forward=error, backward=backward.get(module))
        for module, error in forward.items()
    )


def _by_module(
    candidate: Mapping[str, Mapping[int, Sequence[float]]],
    reference: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    backward: bool,
) -> dict[str, float | None]:
    worst: dict[str, float | None] = {}
    for key, rows in candidate.items():
        module, kind, _ = key.split("|")
        if kind != "out":
            continue
        error = _error(key, rows, reference.get(key), backward=backward)
        known = worst.get(module)
        if error is None:
            worst.setdefault(module, None)
        else:
            worst[module] = error if known is None else max(error, known)
    return worst


def _error(
    key: str,
    rows: Mapping[int, Sequence[float]],
    expected: Mapping[int, Sequence[float]] | None,
    *,
    backward: bool,
) -> float | None:
    """The max error over micro-batches; None if they cannot be compared."""
    if expected is None:
        return None
    module, kind, _ = key.split("|")
    adds = module == ROOT and kind == "out"
    is_experts = module.endswith(".experts") or ".experts." in module
    # Tensor-parallel ranks of an expert compute partial sums over all of its tokens; ranks with
    # replicas of an expert process different tokens.
    may_add = adds or (is_experts and (kind == "in" or not backward))
    found = [
        _row_error(rows[m], expected[m], may_add=may_add, must_add=adds and not backward)
        for m in rows.keys() & expected.keys()
    ]
    if not found or None in found:
        return None
    return max(error for error in found if error is not None)


def _row_error(
    row: Sequence[float], expected: Sequence[float], *, may_add: bool, must_add: bool
) -> float | None:
    count, expected_count = row[0], expected[0]
    if expected_count == 0 or count == 0 or count % expected_count:
        return 0.0 if count == expected_count else None
    copies = count / expected_count
    _, total, squares, cubes, size, cubed_size = expected
    scales = (size, squares, cubed_size, size, cubed_size)
    wanted = (total, squares, cubes, size, cubed_size)
    as_copies = max(
        _ratio(value - copies * want, copies * scale)
        for value, want, scale in zip(row[1:], wanted, scales, strict=True)
    )
    if not may_add or copies == 1:
        return as_copies
    as_sum = _ratio(row[1] - total, size)
    return as_sum if must_add else min(as_copies, as_sum)


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    if not math.isfinite(error) or scale == 0:
        return math.inf
    return abs(error) / scale


def _parent(module: str) -> str:
    return module.rpartition(".")[0] or ROOT
