// Ten kernels of the usual kinds, with which the cost of the checkers is measured (bench_checkers.py).

constexpr int TILE = 16;

// c = a + b: one access pattern, limited by memory.
extern "C" __global__ void vecadd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// y += a * x in steps of the grid: a loop in each thread, memory that is read and then written.
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
}

// c = a @ b: shared tiles, read by many threads.
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

// b = a transposed: strided shared accesses.
extern "C" __global__ void transpose(const float *a, float *b, int n) {
    __shared__ float tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = a[(y + j) * n + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) b[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];
}

// A five-point stencil: neighbours of other threads and blocks are read.
extern "C" __global__ void stencil(const float *a, float *b, int n) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x > 0 && x < n - 1 && y > 0 && y < n - 1)
        b[y * n + x] = 0.2f * (a[y * n + x] + a[y * n + x - 1] + a[y * n + x + 1] + a[(y - 1) * n + x] + a[(y + 1) * n + x]);
}

// *result += the sum of a: shuffles, a barrier, an atomic.
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

// counts[v] += how often byte v occurs: shared and global atomics, single bytes.
extern "C" __global__ void histogram(const unsigned char *values, unsigned int *counts, int n) {
    __shared__ unsigned int local[256];
    local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[values[i]], 1);
    __syncthreads();
    atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

// Prefix sums of each block's part: a barrier for each of few accesses.
extern "C" __global__ void scan(const float *a, float *b) {
    __shared__ float part[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    part[t] = a[i];
    for (int distance = 1; distance < 256; distance *= 2) {
        __syncthreads();
        float more = t >= distance ? part[t - distance] : 0;
        __syncthreads();
        part[t] += more;
    }
    b[i] = part[t];
}

// y = A @ x for a sparse matrix in rows: loops of different lengths, scattered reads.
extern "C" __global__ void spmv(const int *starts, const int *columns, const float *values, const float *x, float *y, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    float sum = 0;
    for (int i = starts[row]; i < starts[row + 1]; i++) sum += values[i] * x[columns[i]];
    y[row] = sum;
}

// All pairs: what is staged in shared memory is read by each thread, whole vectors at a time.
extern "C" __global__ void nbody(const float4 *bodies, float4 *forces, int n) {
    __shared__ float4 tile[128];
    float4 me = bodies[blockIdx.x * 128 + threadIdx.x], force = {0, 0, 0, 0};
    for (int k = 0; k < n; k += 128) {
        tile[threadIdx.x] = bodies[k + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < 128; j++) {
            float x = tile[j].x - me.x, y = tile[j].y - me.y, z = tile[j].z - me.z;
            float r = rsqrtf(x * x + y * y + z * z + 0.01f), f = tile[j].w * r * r * r;
            force.x += f * x, force.y += f * y, force.z += f * z;
        }
        __syncthreads();
    }
    forces[blockIdx.x * 128 + threadIdx.x] = force;
}
