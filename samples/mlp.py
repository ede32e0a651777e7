# Look for: the saw-tooth of activations in the memory timeline, matrix products on the stream, the peak's call sites.
"""Train a small multilayer perceptron with matmul and kernels of our own; the loss goes down."""

import numpy as np

import cudatool as ct

SOURCE = """
extern "C" __global__ void bias_relu(float *x, const float *bias, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) x[i] = fmaxf(x[i] + bias[i % columns], 0.0f);
}
// The gradient passes where the activation was positive.
extern "C" __global__ void relu_backward(float *gradient, const float *activation, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && activation[i] <= 0.0f) gradient[i] = 0.0f;
}
// Softmax and cross entropy of each row, and their gradient: one block a row, `columns` threads.
extern "C" __global__ void softmax_loss(const float *logits, const int *labels, float *gradient, float *loss,
                                        int columns) {
    extern __shared__ float shared[];
    int row = blockIdx.x, column = threadIdx.x;
    float x = logits[row * columns + column];
    shared[column] = x;
    __syncthreads();
    float highest = shared[0];
    for (int c = 1; c < columns; ++c) highest = fmaxf(highest, shared[c]);
    __syncthreads();
    shared[column] = expf(x - highest);
    __syncthreads();
    float sum = 0.0f;
    for (int c = 0; c < columns; ++c) sum += shared[c];
    float p = shared[column] / sum;
    bool hit = column == labels[row];
    gradient[row * columns + column] = (p - (hit ? 1.0f : 0.0f)) / gridDim.x;
    if (hit) atomicAdd(loss, -logf(p) / gridDim.x);
}
extern "C" __global__ void column_sum(const float *x, float *sum, int rows, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float s = 0.0f;
    for (int row = 0; row < rows; ++row) s += x[row * columns + column];
    sum[column] = s;
}
extern "C" __global__ void sgd(float *weight, const float *gradient, float rate, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) weight[i] -= rate * gradient[i];
}
"""
FEATURES, HIDDEN, CLASSES, BATCH, STEPS, RATE = 32, 128, 8, 256, 60, 0.5

kernels = {
    name: ct.compile(SOURCE, name) for name in ("bias_relu", "relu_backward", "softmax_loss", "column_sum", "sgd")
}


def launch(name, n, *arguments):
    """Launch a kernel over n elements."""
    kernels[name][(n + 127) // 128, 128](*arguments)


def update(weight, gradient):
    launch("sgd", weight.size, weight, gradient, RATE, weight.size)


rng = np.random.default_rng(0)
centers = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
w1 = ct.asarray((rng.normal(size=(FEATURES, HIDDEN)) / np.sqrt(FEATURES)).astype(np.float32))
w2 = ct.asarray((rng.normal(size=(HIDDEN, CLASSES)) / np.sqrt(HIDDEN)).astype(np.float32))
b1 = ct.zeros(HIDDEN, np.float32)

losses = []
for step in range(STEPS):
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    points = (centers[labels] + rng.normal(size=(BATCH, FEATURES))).astype(np.float32)
    with ct.range(f"step {step}"):
        x, target = ct.asarray(points), ct.asarray(labels)
        hidden = ct.matmul(x, w1)
        launch("bias_relu", hidden.size, hidden, b1, BATCH, HIDDEN)
        logits = ct.matmul(hidden, w2)
        d_logits, loss = ct.empty((BATCH, CLASSES), np.float32), ct.zeros(1, np.float32)
        config = ct.LaunchConfig(grid=BATCH, block=CLASSES, shmem_size=4 * CLASSES)
        kernels["softmax_loss"][config](logits, target, d_logits, loss, CLASSES)
        d_hidden = ct.matmul(d_logits, w2.T)
        launch("relu_backward", d_hidden.size, d_hidden, hidden, d_hidden.size)
        d_b1 = ct.empty(HIDDEN, np.float32)
        launch("column_sum", HIDDEN, d_hidden, d_b1, BATCH, HIDDEN)
        update(w2, ct.matmul(hidden.T, d_logits))
        update(w1, ct.matmul(x.T, d_hidden))
        update(b1, d_b1)
        losses.append(float(loss.get()[0]))
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step:3}: loss {losses[-1]:.4f}")

assert losses[-1] < 0.25 * losses[0], losses
