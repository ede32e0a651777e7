// More kernels of the usual kinds: with those of kernels.cu, the cost of the checkers is measured (bench_checkers.py).

// y += a * x in steps of the grid: a loop in each thread, memory that is read and then written.
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
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

// Lookups in a table through the read-only cache, by a hash; where results go depends on memory, so that all is checked.
extern "C" __global__ void lookup(const int *__restrict__ places, const float *__restrict__ table, float *__restrict__ out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned hash = i;
    float sum = 0;
    for (int k = 0; k < 32; k++) hash = hash * 1664525u + 1013904223u, sum += table[hash % n];
    out[places[i]] = sum;
}

// The same with loads that see what the launch writes.
extern "C" __global__ void lookup_plain(const int *places, const float *table, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned hash = i;
    float sum = 0;
    for (int k = 0; k < 32; k++) hash = hash * 1664525u + 1013904223u, sum += table[hash % n];
    out[places[i]] = sum;
}

// Neighbors in a ring through the read-only cache: each word is read by several blocks, in runs.
extern "C" __global__ void ring(const int *__restrict__ places, const float *__restrict__ a, float *__restrict__ out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int k = 0; k < 32; k++) sum += a[(i + k * 33) % n];
    out[places[i]] = sum;
}
