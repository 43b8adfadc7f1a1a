"""What is done with the activations of a run's layers, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.types.config import RunConfig

_RUNS_SHOWN = 6


def activation_lines(config: RunConfig, hooks: Hooks) -> Iterator[str]:
    """Yield a line for each part and treatment, with its layers, and for each treatment that has no
    effect."""
    layers: dict[tuple[str, str, str, str], list[int]] = {}
    for index, policy in activation_policies(config, hooks).items():
        found = [(part, *treated, "") for part, treated in policy.treated.items()]
        found += [(part, *treated, by) for part, (treated, by) in policy.overruled.items()]
        for part, owner, treatment, by in found:
            layers.setdefault((part, owner, str(treatment.keeping), by), []).append(index)
    for (part, owner, keeping, by), indices in sorted(layers.items(), key=lambda item: item[0][3]):
        words = f"{part or 'layer'}: {keeping} by {owner} in {layer_words(indices)}"
        yield f"{words}, without effect: {by} recomputes it with more" if by else words


def layer_words(indices: Sequence[int]) -> str:
    """Return ``layer 3``, or ``layers 0 to 3, 8``; many runs of layers are abbreviated."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    if len(words) > _RUNS_SHOWN:
        words = [*words[: _RUNS_SHOWN - 2], "...", words[-1]]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(words)}"
