# race corpus
# rule = "A capture runs nothing: what it allocates from a pool is used at the launches alone"
# source = "Driver API, Stream Management, cuStreamBeginCapture; torch.cuda, CUDA graphs, Sharing memory across captures"
# [expect]
# racy = [["race-waw", "first", "second"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

first, second, capturing, side = ct.CUDAGraph(), ct.CUDAGraph(), ct.Stream(), ct.Stream()
with ct.graph(first, stream=capturing):
    result = ct.empty(N)
    fill(capturing, result)  # @first
first.replay()
del result
with ct.stream(capturing):
    second.capture_begin(pool=first.pool())
    temporary = ct.empty(N)
    fill(capturing, temporary)  # @second
    del temporary
    second.capture_end()
with ct.stream(side if sys.argv[1] == "racy" else ct.current_stream()):
    second.replay()
ct.synchronize()
