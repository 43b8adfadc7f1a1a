"""Evaluate a stored model."""

from __future__ import annotations

from pathlib import Path

import attrs

from ascend_run.text.dataset_paths import is_source
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.model import loaded_model

from .asking import TaskOptions
from .harness.requests import HarnessModel
from .harness.running import HarnessOptions, harness_scores, loaded_harness
from .judging import loaded_tasks, task_result
from .perplexity import WindowOptions, perplexities
from .progress import Progress
from .prompts import Form
from .results import HarnessScore, Results, TaskResult
from .stored_model import StoredModel, chat_template
from .token_streams import DataOptions, token_streams


@attrs.frozen(kw_only=True)
class Evaluation:
    """What a user asks for."""

    model: Path
    options: SourceOptions
    tokenizer: Path | None
    dtype: str | None
    data: tuple[str, ...] = ()
    reading: DataOptions = attrs.field(factory=DataOptions)
    windows: WindowOptions = attrs.field(factory=WindowOptions)
    tasks: tuple[str, ...] = ()
    asking: TaskOptions = attrs.field(factory=TaskOptions)
    harness: HarnessOptions | None = None
    """Tasks of lm-evaluation-harness; None: none."""

    @property
    def needs_tokenizer(self) -> bool:
        """Whether there is text to encode."""
        return bool(self.tasks or self.harness) or any(map(is_source, self.data))


def evaluated(asked: Evaluation, progress: Progress) -> Results:
    """Read all data, then load the model and measure it.

    Raises:
        AscendRunError: The data, the tokenizer or the model cannot be used.
    """
    tasks = loaded_tasks(asked.tasks, asked.asking)
    manager = None if asked.harness is None else loaded_harness(asked.harness)
    texts = None
    if asked.needs_tokenizer:
        texts = model_texts(asked.model, asked.options, asked.tokenizer)
    streams = token_streams(asked.data, asked.reading, texts.tokenizer if texts else None)
    template = None
    if (tasks or asked.harness) and asked.asking.form is Form.CHAT:
        template = chat_template(asked.tokenizer or asked.model)
    dtype = None if asked.dtype is None else DTYPES[asked.dtype]
    with loaded_model(asked.model, asked.options, dtype) as model:
        found: list[TaskResult] = []
        for task in tasks:
            assert texts is not None
            answering = StoredModel(model=model, texts=texts, template=template)
            found.append(task_result(task, answering, asked.asking, progress))
        scores: tuple[HarnessScore, ...] = ()
        if asked.harness is not None:
            assert texts is not None
            harness = HarnessModel.of(model, texts, template)
            scores = harness_scores(manager, harness, asked.harness)
        return Results(
            model=str(asked.model),
            perplexities=tuple(perplexities(model, streams, asked.windows, progress)),
            tasks=tuple(found),
            harness=scores,
        )
