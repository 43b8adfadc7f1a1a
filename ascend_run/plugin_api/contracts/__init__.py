"""The types that cross a hook. Torch appears in annotations only.

Shape letters, here and in every plugin:
    S sequence on this rank, T packed tokens, B micro-batch, N query heads, G key-value heads,
    D head width of q and k, E head width of v, H hidden size, F expert width, X experts here,
    V vocabulary on this rank
"""

from .attention import (
    AttentionFeatures,
    AttentionKernel,
    AttentionResult,
    AttentionSpec,
    DocumentPartition,
    Dropout,
    Mask,
    PositionBias,
    SequencePartition,
    UnevenPartition,
    partition_of,
    whole_length,
)
from .checkpoint import (
    CheckpointEntry,
    CheckpointStore,
    ShardPiece,
)
from .cost import (
    CostChange,
    KeptChange,
    KeptTensor,
    Messages,
    Moment,
    ParameterCost,
    Place,
    RankKind,
    Recomputation,
    WorkingMemory,
)
from .data import (
    Batch,
    BatchField,
    BatchIterator,
    Datasets,
    LossSum,
    SampleBlend,
    Task,
    TokenBlend,
)
from .device import (
    Device,
    HostCopier,
)
from .model import (
    ConfigKey,
    LossKernel,
    ModelFamily,
    PlatformOps,
    TensorMap,
)
from .moe import (
    ExpertActivation,
    ExpertsKernel,
    ExpertWeights,
    GroupedProducts,
)
from .run import (
    Metrics,
    ModelBundle,
    Patch,
    Reading,
    ReportPanel,
    RunContext,
    Wrapper,
)

__all__ = [
    "AttentionFeatures",
    "AttentionKernel",
    "AttentionResult",
    "AttentionSpec",
    "Batch",
    "BatchField",
    "BatchIterator",
    "CheckpointEntry",
    "CheckpointStore",
    "ConfigKey",
    "CostChange",
    "Datasets",
    "Device",
    "DocumentPartition",
    "Dropout",
    "ExpertActivation",
    "ExpertWeights",
    "ExpertsKernel",
    "GroupedProducts",
    "HostCopier",
    "KeptChange",
    "KeptTensor",
    "LossKernel",
    "LossSum",
    "Mask",
    "Messages",
    "Metrics",
    "ModelBundle",
    "ModelFamily",
    "Moment",
    "ParameterCost",
    "Patch",
    "Place",
    "PlatformOps",
    "PositionBias",
    "RankKind",
    "Reading",
    "Recomputation",
    "ReportPanel",
    "RunContext",
    "SampleBlend",
    "SequencePartition",
    "ShardPiece",
    "Task",
    "TensorMap",
    "TokenBlend",
    "UnevenPartition",
    "WorkingMemory",
    "Wrapper",
    "partition_of",
    "whole_length",
]
