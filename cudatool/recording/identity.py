"""Which rank of a job this process is, as launchers tell it in the environment: what a trace's header says of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Final

__all__ = ["job_facts"]

_VARIABLES: Final = {
    # fact of the header -> variables, the first that holds a number counts: torchrun's, Open MPI's, PMI's, Slurm's
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
}
_JOBS: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_NO_JOB: Final = "none"  # torchrun's default


def job_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``host``, and ``rank``, ``world_size``, ``local_rank`` and ``job`` where the environment has them."""
    facts = {"host": platform.node()}
    for fact, variables in _VARIABLES.items():
        found = next((environment[name] for name in variables if environment.get(name, "").isdecimal()), None)
        if found is not None:
            facts[fact] = found
    job = next((environment[name] for name in _JOBS if environment.get(name, _NO_JOB) != _NO_JOB), "")
    return facts | ({"job": job} if job and "rank" in facts else {})
