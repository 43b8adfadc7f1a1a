"""Rank and world size of a process that another launcher started: torchrun, srun, mpirun."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from ascend_run.plugin_api.errors import ConfigError

ATTEMPT_VARIABLE: Final = "ASCEND_RUN_ATTEMPT"
"""Number of the attempt, equal on all nodes; set by our launcher."""
RUN_ID_VARIABLE: Final = "ASCEND_RUN_RUN_ID"
"""Unguessable name of the run, equal on all nodes; set by our launcher."""
_FIRST_PORT: Final = 20000
_NUM_PORTS: Final = 10000


@attrs.frozen(kw_only=True)
class RankEnvironment:
    """One rank of a run, as described by its launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    starter: str
    """Variables that were read: ``RANK and WORLD_SIZE`` or ``SLURM``."""
    rendezvous: Mapping[str, str] = attrs.field(factory=dict)
    """``MASTER_ADDR`` and ``MASTER_PORT``, if the launcher sets them."""

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read the variables that ``variables`` returns; without them this is a single rank."""
        if "RANK" not in environment:
            return cls(rank=0, world_size=1, local_rank=0, starter="")
        return _from_rank(environment)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            **self.rendezvous,
        }


def find_rank_environment(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read this process's rank from its environment; return None if no other launcher started it.

    Raises:
        ConfigError: The variables contradict each other or are incomplete.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        place = _from_rank(environment)
    elif _is_slurm_task(environment):
        place = _from_slurm(environment)
    else:
        return None
    if problems := list(_problems(place)):
        raise ConfigError("the launcher's environment variables are invalid", problems)
    return place


def _from_rank(environment: Mapping[str, str]) -> RankEnvironment:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local = next((name for name in local_names if name in environment), None)
    rendezvous = {n: environment[n] for n in ("MASTER_ADDR", "MASTER_PORT") if n in environment}
    return RankEnvironment(
        rank=rank,
        world_size=size,
        local_rank=rank if local is None else _number(environment, local),
        starter="RANK and WORLD_SIZE",
        rendezvous=rendezvous,
    )


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process. A batch script has a job and a task but no step."""
    is_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return "SLURM_PROCID" in environment and not is_batch_script


def _from_slurm(environment: Mapping[str, str]) -> RankEnvironment:
    in_step = "SLURM_STEP_NUM_TASKS" in environment
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
    job = int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "0")) or 0)
    return RankEnvironment(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        starter="SLURM",
        rendezvous={
            "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
            "MASTER_PORT": environment.get("MASTER_PORT", str(_FIRST_PORT + job % _NUM_PORTS)),
        },
    )


def spans_nodes(environment: Mapping[str, str], world_size: int) -> bool:
    """Return whether the launcher's variables report ranks on several nodes."""
    if int(environment.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        return True
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return any(int(environment[name]) < world_size for name in names if name in environment)


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: ``node[007-012,020],other`` -> ``node007``."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?", hosts)
    return "".join(part or "" for part in match.groups()) if match else hosts


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise ConfigError(f"{name} is not set, although related variables are") from None
    except ValueError:
        raise ConfigError(
            f"{name}={environment[name]!r} in the environment is not an integer"
        ) from None


def _problems(place: RankEnvironment) -> Iterator[str]:
    if not 0 <= place.rank < place.world_size:
        yield f"rank {place.rank} is not below the world size {place.world_size}"
    if place.local_rank < 0:
        yield f"local rank {place.local_rank} is negative"
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in place.rendezvous]
    if place.world_size > 1 and missing:
        yield f"{' and '.join(missing)} must be set if WORLD_SIZE={place.world_size}"
