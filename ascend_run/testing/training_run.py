"""Train a tiny model in a test: a real run, on the ranks of the session."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from .models import DENSE
from .runtime import PLATFORM_VARIABLE
from .small_settings import CHOSEN_BY, settings_of

if TYPE_CHECKING:
    from ascend_run.core.log.metrics import MetricsHistory
    from ascend_run.prepare.config.raw import RawConfig
    from ascend_run.prepare.prepare import PreparedRun

    from .pool import GlooPool
    from .saved_checkpoint import SavedCheckpoint

ORIGIN: Final = "the test"
_NO_METRICS: Final = frozenset({"step", "time"})


class LoggedMetrics(dict[str, tuple[Any, ...]]):
    """Metric (``loss``, ``my-plugin/rms_mean``) -> its logged values, in the order of the steps."""

    def __missing__(self, name: str) -> tuple[Any, ...]:
        raise KeyError(f"no metric '{name}' was logged; there are: {', '.join(sorted(self))}")


@attrs.frozen(kw_only=True)
class TrainingRun:
    """A finished run. Its folder is removed with this object."""

    ranks: int  #: Number of ranks.
    first_step: int
    """1, or the step after the checkpoint that it resumed from."""
    last_step: int  #: The last step that it trained.
    losses: tuple[float, ...]
    """Of each logged step from ``first_step`` to ``last_step``."""
    metrics: Mapping[str, tuple[Any, ...]] = attrs.field(repr=False)
    """Everything in ``metrics.jsonl`` for these steps: name -> value per logged step."""
    folder: Path
    """The run folder (``run.output_dir``), for what a plugin writes and for ``log.jsonl``."""
    _settings: _Settings = attrs.field(repr=False)

    def checkpoint(self, step: int) -> SavedCheckpoint:
        """Read a checkpoint of this run as full tensors. There is one of the last step, and others
        with ``checkpoint.save_interval`` in the run's config.

        Raises:
            CheckpointError: There is none of this step; names those that there are.
        """
        from .saved_checkpoint import read_checkpoint

        return read_checkpoint(self.folder / "checkpoints", step)

    def resume(
        self, *, steps: int = 2, config: Mapping[str, Any] | None = None, ranks: int | None = None
    ) -> TrainingRun:
        """Resume from the last checkpoint in a copy of the run folder; this run stays as it is.

        Args:
            steps: Further steps.
            config: Config keys to change.
            ranks: Number of ranks; default: those of this run.

        Returns:
            The resumed run, with the losses and metrics of the further steps.
        """
        changed = {**self._settings.config, **(config or {})}
        settings = attrs.evolve(self._settings, config=changed, ranks=ranks or self.ranks)
        return settings.train(self.last_step, self.last_step + steps, resumed=self.folder)


def run(
    plugins: str | Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    steps: int = 4,
    documents: Sequence[Sequence[int]] | None = None,
    pool: GlooPool | None = None,
    timeout: float = 100.0,
) -> TrainingRun:
    """Train a tiny model with plugins on one or more ranks, as ``ascend-run train`` does.

    The run has everything of a real one: the checks of ``plan``, core's training loop, a dataset of
    token files, checkpoints, metrics and a run folder. Only its ranks are those of the pytest
    session, so no process is started where they live. The model is ``testing.models.DENSE`` in
    float32. The learning rate is constant, so that a resumed run equals an uninterrupted one::

        def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
            again = testing.run("my-plugin", {"model.num_layers": 2}, ranks=2).resume(steps=2)
            whole = testing.run("my-plugin", {"model.num_layers": 2}, ranks=2, steps=6)
            assert again.losses == whole.losses[4:]
            assert not again.checkpoint(6).differences(whole.checkpoint(6))

    Args:
        plugins: Names of installed plugins of any kind: features are enabled, a platform, task or
            family is selected. Each runs with the ``small_model_settings`` of its manifest.
        config: Config keys, such as ``{"parallel.context_parallel_size": 2}``; they override all
            others. With ``model.hf_path`` the model is the stored one. A task that does not read
            token files needs ``data.train``.
        ranks: Number of ranks; data-parallel ones unless ``config`` has another layout.
        steps: Optimizer steps.
        documents: Token ids to train on; default: short documents that count up or down, which the
            model learns. The last id of the vocabulary is the end-of-document token.
        pool: Ranks to run on; default: those of the pytest session.
        timeout: Limit of the training. Unit: seconds.

    Returns:
        The finished run.

    Raises:
        AscendRunError: The run cannot start, with all problems, as the user of a plugin sees them.
        RankFailure: It failed on a rank, with what the rank reported.
    """
    from .session_pool import session_pool

    settings = _Settings(
        plugins=(plugins,) if isinstance(plugins, str) else tuple(plugins),
        config=config or {},
        ranks=ranks,
        documents=documents,
        pool=pool or session_pool(),
        timeout=timeout,
    )
    return settings.train(0, steps)


@attrs.frozen(kw_only=True)
class _Settings:
    """What a test asks for, and what a resumed run takes over."""

    plugins: tuple[str, ...]
    config: Mapping[str, Any]
    ranks: int
    documents: Sequence[Sequence[int]] | None
    pool: GlooPool
    timeout: float

    def train(self, done: int, last: int, resumed: Path | None = None) -> TrainingRun:
        """Train up to a step.

        Args:
            done: Step of the checkpoint to resume from; 0 for a new run.
            resumed: Run folder to copy and resume.
        """
        from ascend_run.core.log.metrics import read_metrics
        from ascend_run.plugin_api.errors import ConfigError

        if last <= done:
            raise ConfigError(f"steps={last - done}: expected at least 1")
        root = Path(tempfile.mkdtemp(prefix="ascend-run-test-"))
        try:
            folder = root / "run"
            if resumed is not None:
                shutil.copytree(resumed, folder)
            self._train_on_ranks(self._prepare(root, last))
            run = _finished(self, folder, done, last, read_metrics(folder / "metrics.jsonl"))
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        weakref.finalize(run, shutil.rmtree, root, ignore_errors=True)
        return run

    def _prepare(self, root: Path, last: int) -> PreparedRun:
        """Check the run, and write its dataset if it has none of its own."""
        from ascend_run.prepare.prepare import prepare_raw
        from ascend_run.prepare.rank_start import check_run_data

        from .run_job import counting_documents, write_dataset

        tokens = root / "tokens"
        prepared = prepare_raw(self._raw(root, tokens, last), self.ranks)
        config = prepared.config
        if config.data.train == (str(tokens),):
            vocab_size = config.model.vocab_size
            made = counting_documents(vocab_size, config.data.seq_length)
            write_dataset(tokens, self.documents or made, vocab_size)
        check_run_data(prepared)
        return prepared

    def _raw(self, root: Path, tokens: Path, last: int) -> RawConfig:
        from ascend_run.prepare.config.raw import RawConfig, RawValue
        from ascend_run.registry.discovery import discover

        catalogue = discover()
        loaded = catalogue.load(self.plugins)
        features, chosen = [], {"platform": os.environ.get(PLATFORM_VARIABLE, "cpu")}
        small: dict[str, object] = {}
        for name in self.plugins:
            key = CHOSEN_BY.get(catalogue[name].kind)
            small |= settings_of(loaded[name].manifest, of_model=True)
            if key is None:
                features.append(name)
            else:
                chosen[key] = name
        values: dict[str, Any] = {
            **_default_model(self.config),
            "optimizer.lr_decay_style": "constant",
            "optimizer.lr_warmup_iters": 0,
            "checkpoint.keep_last": 0,
            "data.train": [str(tokens)],
            "enable": features,
            **chosen,
            **small,
            "checkpoint.save_interval": last,
            **self.config,
            "train.train_iters": last,
            "run.output_dir": str(root / "run"),
        }
        return RawConfig(values={key: RawValue(value, ORIGIN) for key, value in values.items()})

    def _train_on_ranks(self, prepared: PreparedRun) -> None:
        from ascend_run.launch.failures import summarize
        from ascend_run.plugin_api.errors import RankFailure
        from ascend_run.prepare.handed_over import HandedOver

        from .parity import require_devices
        from .pool import PoolError
        from .run_job import train_rank

        require_devices(self.ranks, prepared.config.platform)
        handed_over = HandedOver.of(prepared).as_json()
        try:
            self.pool.run(train_rank, self.ranks, handed_over, timeout=self.timeout)
        except PoolError as error:
            failure = summarize(error.reports) if error.reports else RankFailure(str(error))
            raise failure from None


def _default_model(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of the tiny model; of a stored one, its folder has those of ``[model]``."""
    stored = config.get("model.hf_path") is not None
    return {key: v for key, v in DENSE.items() if not (stored and key.startswith("model."))}


def _finished(
    settings: _Settings, folder: Path, done: int, last: int, history: MetricsHistory
) -> TrainingRun:
    metrics = LoggedMetrics()
    for record in history.records:
        if record["step"] <= done and not (record["step"] == done == 0):
            continue
        for name, value in record.items():
            if name not in _NO_METRICS:
                metrics[name] = (*metrics.get(name, ()), value)
    return TrainingRun(
        ranks=settings.ranks,
        first_step=done + 1,
        last_step=last,
        losses=metrics["loss"],
        metrics=metrics,
        folder=folder,
        settings=settings,
    )
