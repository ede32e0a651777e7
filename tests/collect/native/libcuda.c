// Stands in for the driver: kernels of `count` parameters of `size` bytes, each in 16 bytes of its own. Odd handles are
// kernels, even ones functions.
#include <stddef.h>
#include <stdint.h>

size_t count, size;
int asked;

static int parameter(size_t index, size_t* offset, size_t* bytes) {
  asked++;
  if (index >= count) return 1;  // CUDA_ERROR_INVALID_VALUE
  *offset = 16 * index;
  *bytes = size;
  return 0;
}
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* bytes) {
  return (uintptr_t)function % 2 ? 400 : parameter(index, offset, bytes);  // CUDA_ERROR_INVALID_HANDLE
}
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* bytes) {
  return (uintptr_t)kernel % 2 ? parameter(index, offset, bytes) : 400;
}
