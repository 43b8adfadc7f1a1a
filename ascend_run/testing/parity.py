"""Compare a run with a plugin with the run without it.

Compares every gradient in float64, and then every parameter after some optimizer steps in float32;
comparing losses alone would miss faults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.types.declarations import Numerics
from ascend_run.types.layout import world_size

from .gloo_on_device import device_count, shares_devices
from .models import MODELS, batch_of_steps, trial_layout
from .runtime import PLATFORM_VARIABLE, RankOutcome, Trial, run_trial
from .tensors import differences, full_tensors

if TYPE_CHECKING:
    from .pool import GlooPool

GRADIENT_TOLERANCE: Final = 1e-10
"""float64, max|a-b| / max|b| of each tensor: allows for a different reduction order."""
TRAINED_TOLERANCE: Final = 1e-5
"""float32, weights and losses after TRAINED_STEPS."""
TRAINED_STEPS: Final = 5
TRIAL_SECONDS: Final = 100.0


class ParityError(AssertionError):
    """A plugin changed results in a way that its manifest does not declare.

    Args:
        headline: Plugins and layout.
        problems: One per tensor.
    """

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{headline}:", *(f"  {problem}" for problem in problems)]))


@attrs.frozen(kw_only=True)
class Case:
    """Plugins, model and layout of a comparison."""

    plugins: tuple[str, ...]
    """Names of the plugins under test."""
    beside: tuple[str, ...] = ()
    """Names of other enabled plugins: those that the layout needs, or to test in combination."""
    model: str = "dense"
    """A key of ``models.MODELS``."""
    layout: Mapping[str, int] = attrs.field(factory=dict)
    """Sizes of ``tp``, ``cp``, ``pp``, ``vpp``, ``ep``, ``expt_tp`` and ``dp``; default: 1."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Config keys for the runs with and without the plugins."""
    options: Mapping[str, object] = attrs.field(factory=dict)
    """Options of the plugins (``plugins.<name>.<field>``)."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return world_size(self.layout)

    def __str__(self) -> str:
        layout = " ".join(f"{axis}={size}" for axis, size in self.layout.items()) or "one rank"
        beside = f" beside {', '.join(self.beside)}" if self.beside else ""
        return f"{', '.join(self.plugins) or 'no plugin'}{beside} ({self.model}, {layout})"

    def trial(
        self, plugins: Sequence[str], *, steps: int, sharded: bool, counted: bool = True
    ) -> Trial:
        """Return a trial of this case's model with some of its plugins."""
        sizes = trial_layout(self.layout) if sharded else {}
        prefixes = tuple(f"plugins.{name}." for name in plugins)
        options = {key: value for key, value in self.options.items() if key.startswith(prefixes)}
        config = {**MODELS[self.model], **self.config}
        chosen = "train.global_batch_size" in self.config
        batch = batch_of_steps(config, self.layout) if steps and not chosen else {}
        return Trial(
            plugins=tuple(plugins),
            config={**config, **batch, **sizes, **options},
            steps=steps,
            counted=counted,
        )


class Parity:
    """Runs trials on a pool of ranks and compares them. Trials are cached.

    Args:
        numerics_of: Returns the numerics that a plugin's manifest declares.
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
        options: Mapping[str, object] | None = None,
    ) -> list[RankOutcome]:
        """Assert that results change only as the plugins' manifests declare. The arguments are
        those of ``Case``; without plugins, the layout is compared with one rank.

        The run is compared with the plain model on one rank, without any plugin. If all plugins
        declare ``bitwise``, it is also compared bitwise with the same layout without them.

        A plugin that declares ``model`` changes the result by design, so it is enabled in the
        reference too: the run is compared with its model on one rank, without the other plugins.

        Returns:
            The result of each rank of the run with the plugins, up to the gradients. Assert an
            effect on it, since a plugin that does nothing passes the comparison.

        Raises:
            ParityError: Lists the parameters that differ.
            ValueError: Both runs would be the same.
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
        others = [name for name in case.plugins if name not in models]
        if models and not others and case.world_size == 1:
            raise ValueError(
                f"{case}: changes the model, so there is nothing to compare it with; give a "
                "layout, or another plugin"
            )
        bitwise = {self._numerics_of(name) for name in others} == {Numerics.BITWISE}
        problems = list(self._problems(case, models, bitwise=bitwise))
        if problems:
            raise ParityError(f"{case} changes the results of the run without", problems)
        return self.outcomes(case)

    def outcomes(self, case: Case, *, steps: int = 0) -> list[RankOutcome]:
        """Return the results of the run with the plugins, by rank."""
        return self._run(case, (*case.beside, *case.plugins), steps=steps)

    def _models(self, case: Case) -> tuple[str, ...]:
        """The plugins that change the model."""
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
                    yield f"{what}, against the same ranks without it, bitwise: {problem}"

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
    """Skip the test if trials run on a device and there are fewer devices than ranks, unless ranks
    share them.

    Without any device nothing is skipped, and the trial fails.

    Args:
        platform: The trial's platform; empty: the one that the environment variable names.
    """
    platform = platform or os.environ.get(PLATFORM_VARIABLE, "cpu")
    if platform == "cpu" or shares_devices():
        return
    count = device_count()
    if 0 < count < world_size:
        import pytest  # imported late: this module is also used without pytest

        pytest.skip(f"{world_size} ranks on platform {platform} need as many devices, not {count}")


def compare(
    outcomes: Sequence[RankOutcome], expected: Sequence[RankOutcome], tolerance: float
) -> Iterator[str]:
    """Compare losses and full tensors of two trials, which may have different layouts; yield a
    message per difference."""
    got, want = full_tensors(outcomes), full_tensors(expected)
    yield from got.problems(tolerance)
    yield from (f"without: {problem}" for problem in want.problems(tolerance))
    for rank, outcome in enumerate(outcomes):
        for what, numbers, wanted in (
            ("loss", outcome.losses, expected[-1].losses),
            ("gradient norm", outcome.grad_norms, expected[-1].grad_norms),
        ):
            for step, (number, right) in enumerate(zip(numbers, wanted, strict=True)):
                error = abs(number - right) / abs(right)
                if not error <= tolerance:
                    yield (
                        f"the {what} of step {step} on rank {rank} has relative error {error:.2e}, "
                        f"tolerance {tolerance:.0e}"
                    )
    yield from differences(got.tensors, want.tensors, tolerance)
