"""Environment variables that make libraries deterministic. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs


@attrs.frozen
class Variable:
    """One variable, and the values that serve."""

    name: str
    accepted: tuple[str, ...]
    """The first is what we set; a user's own that is another of these stays."""

    def value(self, environment: Mapping[str, str]) -> str:
        """The user's where it serves, else ours: the launcher then refuses the user's."""
        own = environment.get(self.name)
        return own if own in self.accepted else self.accepted[0]


_BY_PLATFORM: Final[Mapping[str, tuple[Variable, ...]]] = {
    "cpu": (
        # MKL takes another path by the alignment of its arguments, and as many threads as it likes.
        Variable("MKL_CBWR", ("AUTO,STRICT", "AVX2,STRICT", "AVX512,STRICT", "COMPATIBLE")),
        Variable("MKL_DYNAMIC", ("FALSE", "false", "0")),
        Variable("OMP_DYNAMIC", ("FALSE", "false", "0")),
    ),
    "cuda": (
        # cuBLAS adds in another order when streams share its workspace.
        Variable("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")),
        # What Megatron holds to be deterministic; NVLS, which nccl may choose by itself, is not.
        Variable("NCCL_ALGO", ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
    ),
    "npu": (
        Variable("HCCL_DETERMINISTIC", ("true", "True", "TRUE", "1", "strict")),
        # Keeps a matrix product from shifting along k by the core that takes a tile.
        Variable("CLOSE_MATMUL_K_SHIFT", ("1",)),
    ),
}


def variables_of(platform: str, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variable -> value for a run on a platform; one that is not listed needs none.

    Args:
        seed: ``run.seed``; Python takes 32 bits of it for its hashes.
        environment: What the user has set.
    """
    chosen = {v.name: v.value(environment) for v in _BY_PLATFORM.get(platform, ())}
    hashes = environment.get("PYTHONHASHSEED", "random")  # any number of the user's serves
    return {**chosen, "PYTHONHASHSEED": hashes if hashes != "random" else str(seed % 2**32)}
