"""A program that leaves something of nearly everything that a trace can hold, faults included."""

import numpy as np

import cudatool as ct
from cudatool import blas, ops

SOURCE = """
extern "C" __global__ void fill(float *batch, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) batch[i] = value;
    else batch[i + (1 << 26)] = batch[0] = value;
}
extern "C" __global__ void add(const float *batch, float *total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) total[i] += batch[i];
}
"""
N = 1 << 10


class Model:
    def __init__(self):
        self.kept = [ct.empty_pinned(N)]

    def step(self, number, fill, add, streams):
        with ct.range(f"step {number}"):
            batch, total = ct.empty(N), ct.zeros(N)
            with ct.stream(streams[0]):
                fill[(N // 256 + 1, 256)](batch, float(number), N)
            with ct.stream(streams[1]):
                add[(N // 256, 256)](batch, total, N)
            self.kept.append(ct.empty(3 << 20, np.uint8))
            total.get()
            ops.sum(blas.mm(ct.ones((8, 8)), ct.ones((8, 8))))


model = Model()


def main():
    fill, add = ct.compile(SOURCE, "fill"), ct.compile(SOURCE, "add")
    streams, event = (ct.Stream(), ct.Stream()), ct.Event()
    for number in range(6):
        model.step(number, fill, add, streams)
    streams[0].record_event(event)
    streams[1].wait_event(event)
    graph = ct.CUDAGraph()
    static = ct.zeros(N)
    with ct.graph(graph):
        add[(N // 256, 256)](static, static, N)
    graph.replay()
    ct.synchronize()
    try:
        ct.empty(1 << 40, np.uint8)
    except ct.OutOfMemoryError:
        pass
    ct.empty_cache()
    ct.synchronize()


main()
