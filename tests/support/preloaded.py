"""Imported once by the process that ``forked`` makes its forks of: what every run imports, and no
plugin. Imports of Megatron take seconds."""

from __future__ import annotations

import gc
import os
import warnings

from .forked import OF_PRELOADED

os.environ |= OF_PRELOADED
gc.disable()  # imports leave little garbage, and collections take a second
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's, about each missing optional library
    import ascend_run.core.model.build
    import ascend_run.core.run
    import ascend_run.entrypoints.cli
    import ascend_run.entrypoints.train
    import ascend_run.launch.agent
    import ascend_run.launch.rank
    import ascend_run.prepare.prepare
    import ascend_run.tools.plan.costs
    import ascend_run.tools.report.command  # noqa: F401
gc.enable()
gc.freeze()  # a collection in a fork would copy the pages of all these objects
