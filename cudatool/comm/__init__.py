"""Arrays spread over several devices and brought together again, under the names of ``torch.cuda.comm``.

Everything is enqueued on the current stream of each device that takes part, and waits for nothing on the host.
"""

from cudatool.comm._buckets import broadcast_coalesced, reduce_add_coalesced
from cudatool.comm._spread import broadcast, gather, scatter
from cudatool.comm._sum import reduce_add

__all__ = ["broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter"]
