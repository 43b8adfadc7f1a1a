"""Environment variables that make libraries deterministic. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs


@attrs.frozen
class Variable:
    """An environment variable and its accepted values."""

    name: str
    accepted: tuple[str, ...]
    """The first is the default; a user's value is kept if it is among these."""

    def value(self, environment: Mapping[str, str]) -> str:
        """Return the user's value if it is accepted, else the default.

        The launcher rejects a user's value that differs from the returned one.
        """
        own = environment.get(self.name)
        return own if own in self.accepted else self.accepted[0]


_BY_PLATFORM: Final[Mapping[str, tuple[Variable, ...]]] = {
    "cpu": (
        # MKL chooses its code path by the alignment of its arguments, and its number of threads.
        Variable("MKL_CBWR", ("AUTO,STRICT", "AVX2,STRICT", "AVX512,STRICT", "COMPATIBLE")),
        Variable("MKL_DYNAMIC", ("FALSE", "false", "0")),
        Variable("OMP_DYNAMIC", ("FALSE", "false", "0")),
    ),
    "cuda": (
        # cuBLAS changes its reduction order when streams share its workspace.
        Variable("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")),
        # The algorithms that Megatron accepts as deterministic; nccl may select NVLS, which is not.
        Variable("NCCL_ALGO", ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
    ),
    "npu": (
        Variable("HCCL_DETERMINISTIC", ("true", "True", "TRUE", "1", "strict")),
        # Disables a shift along k of a matmul that depends on the core that computes a tile.
        Variable("CLOSE_MATMUL_K_SHIFT", ("1",)),
    ),
}


def variables_of(platform: str, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a run on a platform; a platform not listed needs none.

    Args:
        seed: ``run.seed``; Python uses 32 bits of it for its hashes.
        environment: Variables that the user has set.
    """
    chosen = {v.name: v.value(environment) for v in _BY_PLATFORM.get(platform, ())}
    hashes = environment.get("PYTHONHASHSEED", "random")  # any number set by the user is accepted
    return {**chosen, "PYTHONHASHSEED": hashes if hashes != "random" else str(seed % 2**32)}
