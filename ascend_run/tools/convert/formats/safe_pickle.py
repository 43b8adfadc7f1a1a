"""Read files of ``torch.save`` without running what is in them.

``torch.load(weights_only=True)`` builds tensors and plain containers only. Megatron's files also
hold the command line of the run, in a few classes; each becomes an ``Inert`` record, so that no
code of these classes runs. Any other name is refused.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from ascend_run.plugin_api.errors import CheckpointError


class Inert:
    """Record of an object: its arguments and state, without behaviour."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: object = None

    def __new__(cls, *args: object) -> Inert:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes of a namespace; empty for anything else."""
        return self.state if isinstance(self.state, dict) else {}


_RECORDED: Final = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "signal.Signals",
    "_io.BytesIO",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "megatron.core.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
)
"""Names that appear in the ``args`` and the states of random generators of Megatron's files."""
_WANTED: Final = re.compile(r"GLOBAL (\S+)")


def load_file(path: Path, *, mmap: bool = True) -> Any:
    """Load a file of ``torch.save``; tensors are mapped, not read, if ``mmap``.

    Raises:
        CheckpointError: The file cannot be read, is truncated, or names anything but tensors and
            the classes above.
    """
    return _load(path, str(path), mmap=mmap)


def load_bytes(stream: IO[bytes], name: str) -> Any:
    """Load from an open file; ``name`` is for messages.

    Raises:
        CheckpointError: See ``load_file``.
    """
    return _load(stream, name, mmap=None)


def _load(source: Path | IO[bytes], name: str, *, mmap: bool | None) -> Any:
    allowed: list[Any] = [(Inert, full) for full in _RECORDED]
    others = torch.serialization.get_safe_globals()  # Megatron, once imported, allows real classes
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as problem:
        if wanted := _WANTED.search(str(problem)):
            raise CheckpointError(
                f"{name} is refused: it asks for {wanted[1]}, and only tensors are read"
            ) from None
        raise CheckpointError(f"{name} is refused: {_first_line(problem)}") from None
    except (FileNotFoundError, PermissionError) as problem:
        raise CheckpointError(f"{name} cannot be read: {problem.strerror or problem}") from None
    except MemoryError:
        raise CheckpointError(f"{name} is corrupt: it asks for more memory than there is") from None
    except Exception as problem:  # a malformed pickle raises anything
        raise CheckpointError(
            f"{name} is truncated, corrupt, or not a file of torch.save: {_first_line(problem)}"
        ) from None
    finally:
        torch.serialization.add_safe_globals(others)


def _first_line(problem: BaseException) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]
