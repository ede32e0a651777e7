"""A two-stream pipeline: one stream makes batches, another adds them up. Shared by the racy and the fixed sample."""

import numpy as np

import cudatool as ct

SOURCE = """
extern "C" __global__ void make_batch(float *batch, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) batch[i] = value;
}
extern "C" __global__ void accumulate(const float *batch, float *total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) total[i] += batch[i];
}
"""
N = 1 << 16
BATCHES = 4


def run(*, with_waits: bool) -> float:
    """Return the total of one element, which is 1 + 2 + 3 + 4 if the streams wait for each other."""
    make_batch, accumulate = ct.compile(SOURCE, "make_batch"), ct.compile(SOURCE, "accumulate")
    config = (N // 256, 256)
    batch, total = ct.zeros(N, np.float32), ct.zeros(N, np.float32)
    ct.synchronize()
    producer, consumer = ct.Stream(), ct.Stream()
    for number in range(1, BATCHES + 1):
        if with_waits:
            producer.wait_stream(consumer)  # the batch before has been read
        with ct.stream(producer):
            make_batch[config](batch, float(number), N)
        if with_waits:
            consumer.wait_stream(producer)  # this batch has been written
        with ct.stream(consumer):
            accumulate[config](batch, total, N)
    ct.synchronize()
    return float(total.get()[0])
