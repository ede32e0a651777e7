# race corpus
# rule = "A kernel launched with programmatic stream serialization may begin before the kernel before it has ended"
# source = "CUDA Programming Guide, Programmatic Dependent Launch and Synchronization; PTX ISA, griddepcontrol"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# serialized = []
# not_triggered = []
# ---
import sys

from race_kernels import N

import cudatool as ct

SOURCE = """
extern "C" __global__ void produce(float *x, int n) {
#ifdef TRIGGER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = i;
}
extern "C" __global__ void consume(float *y, const float *x, int n) {
#ifdef WAIT
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}"""
TRIGGER = "" if sys.argv[1] == "not_triggered" else "#define TRIGGER\n"
WAIT = "#define WAIT\n" if sys.argv[1] == "fixed" else ""
produce = ct.compile(TRIGGER + SOURCE, "produce")
consume = ct.compile(WAIT + SOURCE, "consume")

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
stream = ct.Stream()
plain = ct.LaunchConfig(grid=8, block=128)
early = ct.LaunchConfig(grid=8, block=128, programmatic_stream_serialization=sys.argv[1] != "serialized")
ct.launch(stream, plain, produce, x, N)  # @write
ct.launch(stream, early, consume, y, x, N)  # @read
ct.synchronize()
