# race corpus
# rule = "An external wait in a graph holds back the nodes that come after it, not those before it or beside it"
# source = "Driver API, Stream Management, cuStreamWaitEvent, CU_EVENT_WAIT_EXTERNAL"
# [expect]
# before = [["race-raw", "write", "before"]]
# beside = [["race-raw", "write", "beside"]]
# after = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
variant = sys.argv[1]
graph, other, branch, ready = ct.CUDAGraph(), ct.Stream(), ct.Stream(), ct.Event(external=True)
ready.record(other)  # the first record makes the event
with ct.graph(graph):
    main = ct.current_stream()
    fill(main, z)
    branch.wait_stream(main)
    if variant == "before":
        copy(main, y, x)  # @before
    ready.wait()
    if variant == "after":
        copy(main, y, x)
    if variant == "beside":
        copy(branch, y, x)  # @beside
    fill(main, z)
    main.wait_stream(branch)
for _ in range(2):
    fill(other, x)  # @write
    ready.record(other)
    graph.replay()
    ct.synchronize()
