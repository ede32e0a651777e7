# Look for: one all_reduce per step on each device's stream, after the matrix products of its half of the batch.
"""Train the perceptron of mlp.py on all devices of the process, each with its share of the batch.

Every device has the whole model and computes the gradients of its share; all_reduce adds them up (NCCL on GPUs), and
every device performs the same update. On a machine without GPUs: ``--device sim:count=2``.
"""

import numpy as np

import cudatool as ct
from cudatool import comm, nccl

SOURCE = """
extern "C" __global__ void bias_relu(float *x, const float *bias, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) x[i] = fmaxf(x[i] + bias[i % columns], 0.0f);
}
extern "C" __global__ void relu_backward(float *gradient, const float *activation, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && activation[i] <= 0.0f) gradient[i] = 0.0f;
}
// One block a row, one thread a class; `count` rows in the batches of all devices together.
extern "C" __global__ void softmax_loss(const float *logits, const int *labels, float *gradient, float *loss,
                                        int columns, int count) {
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
    gradient[row * columns + column] = (p - (hit ? 1.0f : 0.0f)) / count;
    if (hit) atomicAdd(loss, -logf(p) / count);
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
FEATURES, HIDDEN, CLASSES, BATCH, STEPS, RATE = 32, 128, 8, 256, 30, 0.5
SHAPES = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES)]


class Replica:
    """The model on one device. Its parameters are views of one array, and so are its gradients and the loss."""

    def __init__(self, parameters):
        self.device = parameters.device
        with ct.device(self.device):
            names = ("bias_relu", "relu_backward", "softmax_loss", "column_sum", "sgd")
            self.kernels = {name: ct.compile(SOURCE, name) for name in names}
            self.parameters, self.gradients = parameters, ct.zeros(parameters.size + 1)
        (self.w1, self.b1, self.w2), (self.d_w1, self.d_b1, self.d_w2) = views(parameters), views(self.gradients)
        self.loss = self.gradients[-1:]

    def launch(self, name, n, *arguments):
        self.kernels[name][(n + 127) // 128, 128](*arguments)

    def backward(self, x, labels):
        """Set gradients and loss to this share's part of those of the whole batch."""
        with ct.device(self.device):
            rows = len(x)
            self.loss.fill_(0)
            hidden = ct.matmul(x, self.w1)
            self.launch("bias_relu", hidden.size, hidden, self.b1, rows, HIDDEN)
            logits = ct.matmul(hidden, self.w2)
            d_logits = ct.empty((rows, CLASSES), np.float32)
            config = ct.LaunchConfig(grid=rows, block=CLASSES, shmem_size=4 * CLASSES)
            self.kernels["softmax_loss"][config](logits, labels, d_logits, self.loss, CLASSES, BATCH)
            d_hidden = ct.matmul(d_logits, self.w2.T)
            self.launch("relu_backward", d_hidden.size, d_hidden, hidden, d_hidden.size)
            ct.matmul(hidden.T, d_logits, out=self.d_w2)
            ct.matmul(x.T, d_hidden, out=self.d_w1)
            self.launch("column_sum", HIDDEN, d_hidden, self.d_b1, rows, HIDDEN)

    def step(self):
        with ct.device(self.device):
            size = self.parameters.size
            self.launch("sgd", size, self.parameters, self.gradients, RATE, size)


def views(flat):
    """Return the parts of an array that are the parameters."""
    parts, start = [], 0
    for shape in SHAPES:
        stop = start + int(np.prod(shape))
        parts.append(flat[start:stop].reshape(shape))
        start = stop
    return parts


def train(devices):
    """Return the losses and the parameters at the end."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    scales = np.concatenate([np.full(int(np.prod(s)), s[0] ** -0.5 if len(s) == 2 else 0) for s in SHAPES])
    start = (rng.normal(size=scales.size) * scales).astype(np.float32)
    replicas = [Replica(parameters) for parameters in comm.broadcast(start, devices)]
    losses = []
    for step in range(STEPS):
        labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        points = (centers[labels] + rng.normal(size=(BATCH, FEATURES))).astype(np.float32)
        with ct.range(f"step {step}"):
            shares = zip(replicas, comm.scatter(points, devices), comm.scatter(labels, devices), strict=True)
            for replica, x, target in shares:
                replica.backward(x, target)
            nccl.all_reduce([replica.gradients for replica in replicas])
            for replica in replicas:
                replica.step()
            losses.append(float(replicas[0].loss.get()[0]))
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2} on {len(devices)} of {ct.device_count()}: loss {losses[-1]:.4f}")
    parameters = [replica.parameters.get() for replica in replicas]
    for other in parameters[1:]:
        np.testing.assert_array_equal(other, parameters[0])  # the same update on every device
    return losses, parameters[0]


losses, parameters = train(list(range(ct.device_count())))
expected_losses, expected = train([0])
np.testing.assert_allclose(losses, expected_losses, rtol=1e-3, atol=1e-4)
np.testing.assert_allclose(parameters, expected, rtol=1e-2, atol=1e-3)
assert losses[-1] < 0.3 * losses[0], losses
