"""The words of a manifest. Imports no attrs, so that static manifests are read without it."""

from __future__ import annotations

import enum


class Claim(enum.StrEnum):
    """The parts of a run that only one plugin may own.

    Implementing a provider hook implies its claim (see the hook's specification), which must not be
    repeated in the manifest. Claims without a provider hook are declared in the manifest:
    ``dataset`` for tasks whose samples are not Megatron token files, and ``documents``,
    ``token-dispatcher``, ``linear-comm``, ``parameter-storage``, ``adapter``, ``schedule`` and
    ``checkpoint-store`` for plugins that own such a part through a wrapper hook. Two enabled
    plugins with the same claim are an error.
    """

    ATTENTION_KERNEL = "attention-kernel"  #: Attention on one device.
    POSITION_BIAS = "position-bias"  #: A bias by distance.
    CONTEXT_PARALLEL = "context-parallel"  #: How a sequence is sharded, and its exchange.
    EXPERTS = "experts"  #: MLPs of the experts.
    TOKEN_DISPATCHER = "token-dispatcher"  #: First: ``moe-alltoall-opt``.
    ROUTER = "router"  #: Selection of experts.
    LINEAR_COMM = "linear-comm"  #: Collectives of parallel linears.
    PARAMETER_STORAGE = "parameter-storage"  #: In what form trained weights are kept.
    WEIGHT_STORAGE = "weight-storage"  #: In what form frozen weights are kept between uses.
    ADAPTER = "adapter"  #: Trained beside frozen weights; off in ``RunPhase.REFERENCE``.
    DATA_PARALLEL = "data-parallel"  #: Gradient reduction.
    OPTIMIZER = "optimizer"  #: The update of the weights.
    SCHEDULE = "schedule"  #: First: ``dualpipev``.
    CHECKPOINT_STORE = "checkpoint-store"  #: First: ``async-save``.
    DATASET = "dataset"  #: The source of the samples.
    DOCUMENTS = "documents"  #: Where documents end in rows; with ``dataset``, how long they may be.
    TASK = "task"  #: What is trained.
    MODEL_FAMILY = "model-family"  #: Keys and tensors of a model.
    PLATFORM = "platform"  #: The device.
    PLATFORM_OPS = "platform-ops"  #: Fused operators.
    NORM = "norm"  #: The model's norm layers.


class Numerics(enum.StrEnum):
    """How enabling a plugin may change the numerical results of a run."""

    BITWISE = "bitwise"  #: Not at all: results are bitwise equal.
    ROUNDING = "rounding"  #: By rounding only, such as a different reduction order.
    MODEL = "model"  #: By design: it changes the model.


class Maturity(enum.StrEnum):
    """How mature a plugin is."""

    STABLE = "stable"  #: Complete, and not expected to change.
    BETA = "beta"  #: Complete; its options may change.
    EXPERIMENTAL = "experimental"  #: It may change in any way.


class Support(enum.StrEnum):
    """How well a plugin is verified on a platform."""

    REAL = "real"
    """Its tests pass on that device."""
    EMULATED = "emulated"
    """Its tests pass there, with an emulation of its target: for example copies to the host,
    although device and host share one memory, or gloo between ranks in place of nccl."""
    ARITHMETIC = "arithmetic"
    """Not run on the device. Every operator call matches the schema of the device library, and
    with reference kernels for these operators the same code matches the CPU, on several ranks."""
    SCHEMA = "schema"
    """Not run on the device. Operator calls match the schemas; results are not checked."""
    UNVERIFIED = "unverified"
    """Written for that platform, without verification."""
    REFUSED = "refused"
    """Not supported."""
