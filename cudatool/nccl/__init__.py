"""Collective operations over several devices, under the names of ``torch.cuda.nccl``: NCCL on GPUs.

The functions are for one process that has several devices; a :class:`Communicator` is also for one process a device.
"""

from cudatool.nccl._calls import AVG, MAX, MIN, PROD, SUM
from cudatool.nccl._communicator import Communicator, group, init_all, init_rank, unique_id, version
from cudatool.nccl._lists import all_gather, all_reduce, broadcast, is_available, reduce, reduce_scatter

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Communicator",
    "all_gather",
    "all_reduce",
    "broadcast",
    "group",
    "init_all",
    "init_rank",
    "is_available",
    "reduce",
    "reduce_scatter",
    "unique_id",
    "version",
]
