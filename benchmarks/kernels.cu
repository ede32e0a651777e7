// The kernels that the software device's speed is measured with. Sizes: 16 Mi elements; 512 x 512 matrices.

constexpr int TILE = 16;
constexpr int BINS = 256;

// c = a + b. Grid: one thread per element.
extern "C" __global__ void vecadd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// c = a @ b for square matrices of a size that is a multiple of TILE. Block: TILE x TILE.
extern "C" __global__ void matmul(const float *a, const float *b, float *c, int n) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += TILE) {
        as[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
        bs[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
        __syncthreads();
        for (int j = 0; j < TILE; j++) sum += as[threadIdx.y][j] * bs[j][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

// *result += the sum of a, by warp shuffles. Block: a multiple of 32 threads.
extern "C" __global__ void reduce(const float *a, float *result, int n) {
    __shared__ float partial[32];
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += a[i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
        if (threadIdx.x == 0) atomicAdd(result, sum);
    }
}

// counts[v] += how often byte v occurs. Block: at least BINS threads.
extern "C" __global__ void histogram(const unsigned char *values, unsigned int *counts, int n) {
    __shared__ unsigned int local[BINS];
    if (threadIdx.x < BINS) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[values[i]], 1);
    __syncthreads();
    if (threadIdx.x < BINS) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}
