# race corpus
# rule = "The host may read what was copied once a query of an event behind the copy answered done"
# source = "Driver API, Event Management, cuEventQuery"
# cuda = "a GPU may be done before it is asked"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, stream, pinned = ct.ones(N), ct.Stream(), ct.empty_pinned(N)
ct.synchronize()
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
event = stream.record_event()
if sys.argv[1] == "fixed":
    while not event.query():
        pass
else:
    assert not event.query()
float(ct.host_view(pinned)[0])  # @read
