"""The public API for plugin authors; import every name from here. Importing it imports no torch.

``help("ascend_run.reference")`` lists the pages that describe every hook, record and error.
"""
# ruff: noqa: F403  # contracts re-exports its names one by one

from ascend_run.types.api_version import API_VERSION as API_VERSION
from ascend_run.types.condition import Condition as Condition
from ascend_run.types.config import CheckpointSection as CheckpointSection
from ascend_run.types.config import DataSection as DataSection
from ascend_run.types.config import DdpSection as DdpSection
from ascend_run.types.config import FieldSection as FieldSection
from ascend_run.types.config import FrozenMapping as FrozenMapping
from ascend_run.types.config import OptimizerSection as OptimizerSection
from ascend_run.types.config import RunConfig as RunConfig
from ascend_run.types.config import RunSection as RunSection
from ascend_run.types.config import TrainSection as TrainSection
from ascend_run.types.declarations import Claim as Claim
from ascend_run.types.declarations import Maturity as Maturity
from ascend_run.types.declarations import Numerics as Numerics
from ascend_run.types.declarations import Support as Support
from ascend_run.types.layout import Layout as Layout

from .contracts import *
from .error_text import around as around
from .error_text import divisors as divisors
from .error_text import one_of as one_of
from .errors import AscendRunError as AscendRunError
from .errors import CheckpointError as CheckpointError
from .errors import ConfigError as ConfigError
from .errors import DataError as DataError
from .errors import HookError as HookError
from .errors import LayoutError as LayoutError
from .errors import PlatformError as PlatformError
from .errors import PluginLoadError as PluginLoadError
from .errors import PluginResolutionError as PluginResolutionError
from .errors import RankFailure as RankFailure
from .errors import StorageError as StorageError
from .hook_kinds import HookKind as HookKind
from .hook_kinds import Point as Point
from .hook_kinds import hookimpl as hookimpl
from .legacy_flags import ANY as ANY
from .legacy_flags import LegacyFlag as LegacyFlag
from .manifest import Manifest as Manifest
