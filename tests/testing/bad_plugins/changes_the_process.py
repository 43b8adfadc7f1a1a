"""Wrong: settings of the process at import."""

import os
import warnings

from .base import Listens, declared

os.environ["ASCEND_RUN_BAD_PLUGIN"] = "here"
warnings.simplefilter("ignore")


class ChangesTheProcess(Listens):
    manifest = declared("changes-the-process")
