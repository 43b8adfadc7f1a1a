"""The types of hook arguments and return values. Torch appears in annotations only.

``import A as A`` re-exports a name to type checkers.

Shape letters, here and in every plugin:
    S sequence on this rank, T packed tokens, B micro-batch, N query heads, G key-value heads,
    D head width of q and k, E head width of v, H hidden size, F MLP width of an expert,
    X local experts, V vocabulary on this rank
"""

from ascend_run.types.attention import AttentionFeatures as AttentionFeatures
from ascend_run.types.attention import AttentionKernel as AttentionKernel
from ascend_run.types.attention import AttentionResult as AttentionResult
from ascend_run.types.attention import AttentionSpec as AttentionSpec
from ascend_run.types.attention import CachedAttentionKernel as CachedAttentionKernel
from ascend_run.types.attention import CachedKeys as CachedKeys
from ascend_run.types.attention import DocumentPartition as DocumentPartition
from ascend_run.types.attention import Dropout as Dropout
from ascend_run.types.attention import Mask as Mask
from ascend_run.types.attention import PositionBias as PositionBias
from ascend_run.types.attention import SequencePartition as SequencePartition
from ascend_run.types.attention import UnevenPartition as UnevenPartition
from ascend_run.types.attention import full_length as full_length
from ascend_run.types.attention import partition_of as partition_of
from ascend_run.types.checkpoint import CheckpointEntry as CheckpointEntry
from ascend_run.types.checkpoint import CheckpointStore as CheckpointStore
from ascend_run.types.checkpoint import TensorShard as TensorShard
from ascend_run.types.cost import Communication as Communication
from ascend_run.types.cost import CostChange as CostChange
from ascend_run.types.cost import ParameterCost as ParameterCost
from ascend_run.types.cost import Phase as Phase
from ascend_run.types.cost import PipelineStage as PipelineStage
from ascend_run.types.cost import RecomputedAhead as RecomputedAhead
from ascend_run.types.cost import SavedChange as SavedChange
from ascend_run.types.cost import SavedTensor as SavedTensor
from ascend_run.types.cost import Storage as Storage
from ascend_run.types.cost import WorkingMemory as WorkingMemory
from ascend_run.types.data import ArrayCache as ArrayCache
from ascend_run.types.data import Arrays as Arrays
from ascend_run.types.data import Batch as Batch
from ascend_run.types.data import BatchField as BatchField
from ascend_run.types.data import BatchIterator as BatchIterator
from ascend_run.types.data import Datasets as Datasets
from ascend_run.types.data import FrozenPass as FrozenPass
from ascend_run.types.data import LossSum as LossSum
from ascend_run.types.data import NoCache as NoCache
from ascend_run.types.data import RoleSpec as RoleSpec
from ascend_run.types.data import SampleBlend as SampleBlend
from ascend_run.types.data import Samples as Samples
from ascend_run.types.data import Task as Task
from ascend_run.types.device import CommOptions as CommOptions
from ascend_run.types.device import Device as Device
from ascend_run.types.device import HostCopier as HostCopier
from ascend_run.types.forward import ActivationTreatment as ActivationTreatment
from ascend_run.types.forward import Forward as Forward
from ascend_run.types.forward import ForwardChain as ForwardChain
from ascend_run.types.forward import ForwardLink as ForwardLink
from ascend_run.types.forward import Keeping as Keeping
from ascend_run.types.forward import LinkPlace as LinkPlace
from ascend_run.types.forward import NamedLink as NamedLink
from ascend_run.types.forward import chain_of as chain_of
from ascend_run.types.model import ConfigKey as ConfigKey
from ascend_run.types.model import KeyForm as KeyForm
from ascend_run.types.model import ModelFamily as ModelFamily
from ascend_run.types.model import PlatformOps as PlatformOps
from ascend_run.types.model import TensorMap as TensorMap
from ascend_run.types.model import WeightStorage as WeightStorage
from ascend_run.types.moe import ExpertActivation as ExpertActivation
from ascend_run.types.moe import ExpertsKernel as ExpertsKernel
from ascend_run.types.moe import ExpertWeights as ExpertWeights
from ascend_run.types.moe import GroupedGemm as GroupedGemm
from ascend_run.types.moe import TokenDispatcher as TokenDispatcher
from ascend_run.types.optimizer import MixedPrecisionOptimizer as MixedPrecisionOptimizer
from ascend_run.types.optimizer import OptimizerSpec as OptimizerSpec
from ascend_run.types.optimizer import OptimizerState as OptimizerState
from ascend_run.types.optimizer import SteppedParameter as SteppedParameter
from ascend_run.types.run import Metrics as Metrics
from ascend_run.types.run import MetricValue as MetricValue
from ascend_run.types.run import ModelBundle as ModelBundle
from ascend_run.types.run import ModuleWrapper as ModuleWrapper
from ascend_run.types.run import Patch as Patch
from ascend_run.types.run import ReportPanel as ReportPanel
from ascend_run.types.run import RunContext as RunContext
from ascend_run.types.run import RunPhase as RunPhase
from ascend_run.types.run import Wrapper as Wrapper
