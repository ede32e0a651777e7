# Look for: one kernel and three copies under "Kernels" and "Copies", and each allocation's line in this file.
"""Add two vectors with a kernel compiled from CUDA C++ at run time."""

import numpy as np

import cudatool as ct

SOURCE = """
template <typename T>
__global__ void add(const T *a, const T *b, T *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""

n = 1 << 20
rng = np.random.default_rng(0)
x, y = rng.random(n, np.float32), rng.random(n, np.float32)

add = ct.compile(SOURCE, "add<float>")
a, b = ct.asarray(x), ct.asarray(y)
c = ct.empty(n, np.float32)
add[(n + 255) // 256, 256](a, b, c, n)

assert np.array_equal(c.get(), x + y)
print(f"added {n:,} numbers on {ct.get_device_name()}")
