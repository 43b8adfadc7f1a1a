"""Does a run with a plugin compute what the run without it computes?

Per parameter, before the optimizer, in float64; then once more after some optimizer steps in
float32. Never by the loss alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api.layout import world_size
from ascend_run.plugin_api.manifest import Numerics

from .models import MODELS, trial_layout
from .runtime import PLATFORM_VARIABLE, RankOutcome, Trial, run_trial
from .tensors import differences, whole_of

if TYPE_CHECKING:
    from .pool import GlooPool

GRADIENT_TOLERANCE: Final = 1e-10
"""float64, max|a-b| / max|b| of each tensor: what changing the order of sums may come to."""
TRAINED_TOLERANCE: Final = 1e-5
"""float32, weights and losses after TRAINED_STEPS."""
TRAINED_STEPS: Final = 5
TRIAL_SECONDS: Final = 100.0


class ParityError(AssertionError):
    """A plugin changed numbers that it says it does not change.

    Args:
        headline: Which plugin, beside which, in which layout.
        problems: One for each tensor.
    """

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{headline}:", *(f"  {problem}" for problem in problems)]))


@attrs.frozen(kw_only=True)
class Case:
    """Which plugins, on which model, in which layout."""

    plugins: tuple[str, ...]
    """Under test, by name."""
    beside: tuple[str, ...] = ()
    """Enabled too: what the layout needs, or what it must get on with."""
    model: str = "dense"
    """A key of ``models.MODELS``."""
    layout: Mapping[str, int] = attrs.field(factory=dict)
    """Sizes of ``tp``, ``cp``, ``pp``, ``vpp``, ``ep``, ``expt_tp`` and ``dp``; what is not named
    is 1 (``vpp``: one chunk)."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """More config keys, for the run with and the run without."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Config keys of the plugins' own (``plugins.<name>.<field>``)."""

    @property
    def world_size(self) -> int:
        return world_size(self.layout)

    def __str__(self) -> str:
        layout = " ".join(f"{axis}={size}" for axis, size in self.layout.items()) or "one rank"
        beside = f" beside {', '.join(self.beside)}" if self.beside else ""
        return f"{', '.join(self.plugins) or 'no plugin'}{beside} ({self.model}, {layout})"

    def trial(
        self, plugins: Sequence[str], *, steps: int, sharded: bool, counted: bool = True
    ) -> Trial:
        """A run of this case's model, with these of its plugins."""
        sizes = trial_layout(self.layout) if sharded else {}
        prefixes = tuple(f"plugins.{name}." for name in plugins)
        options = {key: value for key, value in self.options.items() if key.startswith(prefixes)}
        return Trial(
            plugins=tuple(plugins),
            config={**MODELS[self.model], **self.config, **sizes, **options},
            steps=steps,
            counted=counted,
        )


class Parity:
    """Makes trials on a pool of ranks and compares them.

    Calling it is the whole test; a plain run is made once and compared with many.

    Args:
        numerics_of: Plugin's name -> what its manifest declares.
    """

    def __init__(self, pool: GlooPool, numerics_of: Callable[[str], Numerics]) -> None:
        self._pool, self._numerics_of = pool, numerics_of
        self._made: dict[str, list[RankOutcome]] = {}

    def __call__(
        self,
        plugins: str | Sequence[str],
        *,
        beside: Sequence[str] = (),
        model: str = "dense",
        layout: Mapping[str, int] | None = None,
        config: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[RankOutcome]:
        """Assert that the plugins keep what their manifests declare; ``Case`` has the arguments.
        One plugin may be given by its name alone, and none compares the layouts themselves.

        The run with them is compared with the plain model on one rank, without any plugin. Where
        all declare ``bitwise``, it is compared as well with the same layout without them, and
        then every bit counts.

        A plugin that declares ``model`` changes the result by design, so it stands on both sides:
        its model on one rank, without the others, is what the others must keep.

        Returns:
            What each rank of the run with the plugins did, up to the gradients: assert an effect
            on it, since a plugin that does nothing is at parity.

        Raises:
            ParityError: With the parameters that differ.
            ValueError: Both sides would be the same run.
        """
        case = Case(
            plugins=(plugins,) if isinstance(plugins, str) else tuple(plugins),
            beside=tuple(beside),
            model=model,
            layout=layout or {},
            config=config or {},
            options=options or {},
        )
        models = self._models(case)
        kept = [name for name in case.plugins if name not in models]
        if models and not kept and case.world_size == 1:
            raise ValueError(
                f"{case}: changes the model, so there is nothing to compare it with; give a "
                "layout, or another plugin"
            )
        bitwise = {self._numerics_of(name) for name in kept} == {Numerics.BITWISE}
        problems = list(self._problems(case, models, bitwise=bitwise))
        if problems:
            raise ParityError(f"{case} does not keep the numbers of the run without", problems)
        return self.outcomes(case)

    def outcomes(self, case: Case, *, steps: int = 0) -> list[RankOutcome]:
        """The run with the plugins, by rank."""
        return self._run(case, (*case.beside, *case.plugins), steps=steps)

    def _models(self, case: Case) -> tuple[str, ...]:
        """Those that change the model."""
        names = (*case.beside, *case.plugins)
        return tuple(name for name in names if self._numerics_of(name) is Numerics.MODEL)

    def _problems(self, case: Case, models: tuple[str, ...], *, bitwise: bool) -> Iterator[str]:
        alone = f"with {', '.join(models)} alone" if models else "without plugins"
        for steps, tolerance in ((0, GRADIENT_TOLERANCE), (TRAINED_STEPS, TRAINED_TOLERANCE)):
            what = f"after {steps} steps" if steps else "gradient"
            run = partial(self._run, case, steps=steps, counted=not steps)
            outcomes = run((*case.beside, *case.plugins))
            plain = run(models, sharded=False)
            for problem in compare(outcomes, plain, tolerance):
                yield f"{what}, against one rank {alone}: {problem}"
            if bitwise:
                without = run(tuple(dict.fromkeys((*case.beside, *models))))
                for problem in compare(outcomes, without, 0.0):
                    yield f"{what}, against the same ranks without it, bit for bit: {problem}"

    def _run(
        self,
        case: Case,
        plugins: Sequence[str],
        *,
        steps: int,
        sharded: bool = True,
        counted: bool = True,
    ) -> list[RankOutcome]:
        trial = case.trial(plugins, steps=steps, sharded=sharded, counted=counted)
        world_size = case.world_size if sharded else 1
        require_devices(world_size, str(trial.config.get("platform", "")))
        key = f"{world_size} {trial}"
        if key not in self._made:
            self._made[key] = self._pool.run(run_trial, world_size, trial, timeout=TRIAL_SECONDS)
        return self._made[key]


def require_devices(world_size: int, platform: str = "") -> None:
    """Skip the test, with the reason, where trials run on a device of which there are too few.

    Where there is none at all nothing is skipped: the trial then fails and says so.

    Args:
        platform: What the trial names itself; empty is what the environment asks for.
    """
    platform = platform or os.environ.get(PLATFORM_VARIABLE, "cpu")
    if platform == "cpu":
        return
    count = device_count()
    if 0 < count < world_size:
        import pytest  # the kit's numbers are of use without it

        pytest.skip(f"{world_size} ranks on platform {platform} need as many devices, not {count}")


def device_count() -> int:
    """Accelerators that torch sees on this machine."""
    import torch

    return torch.accelerator.device_count()


def compare(
    outcomes: Sequence[RankOutcome], expected: Sequence[RankOutcome], tolerance: float
) -> Iterator[str]:
    """Losses and whole tensors of two trials; the second may be in another layout."""
    got, want = whole_of(outcomes), whole_of(expected)
    yield from got.problems(tolerance)
    yield from (f"without: {problem}" for problem in want.problems(tolerance))
    for rank, outcome in enumerate(outcomes):
        for what, numbers, wanted in (
            ("loss", outcome.losses, expected[-1].losses),
            ("gradient norm", outcome.grad_norms, expected[-1].grad_norms),
        ):
            for step, (number, right) in enumerate(zip(numbers, wanted, strict=True)):
                apart = abs(number - right) / abs(right)
                if not apart <= tolerance:
                    yield (
                        f"the {what} of step {step} on rank {rank} is off by {apart:.2e}, "
                        f"allowed {tolerance:.0e}"
                    )
    yield from differences(got.tensors, want.tensors, tolerance)
