"""printf in kernels: the C formats, how arguments are passed, and when the buffer is written."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver

FORMATS = [
    ("%d|%5d|%-5d|%05d|%+d|% d", "-7, 42, 42, 42, 42, 42"),
    ("%i|%u|%x|%X|%#x|%o|%#o", "-7, 4000000000u, 48879, 48879, 48879, 8, 8"),
    ("%ld|%lld|%lu|%llx", "-5000000000l, -5000000000ll, 5000000000ul, 0xdeadbeefcafell"),
    ("%hd|%hu|%hhd", "(short)-3, (unsigned short)65535, (signed char)-1"),
    ("%f|%.2f|%8.3f|%-10.1f|%+.0f", "1.5f, 2.345, 3.14159, 2.5, 7.0"),
    ("%e|%.3E|%g|%G|%a", "12345.678, 0.00012, 1e-10, 1e20, 1.0"),
    ("%c%c|%s|%10s|%-10s|%.2s", '\'a\', \'b\', "text", "right", "left", "cut"'),
    ("%%|100%%|%d%%", "5"),
    ("%*d|%-*d|", "6, 42, 6, 42"),
    ("%.*f|%.*f", "2, 3.14159, -3, 3.14159"),
    ("%" + "0" * 60 + "30d|%.70d|%-80s|", '7, 7, "left"'),
    ("nothing to format", ""),
]


def _expected(form: str, values: str) -> str:
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(4096)
    arguments = []
    for text in filter(None, (part.strip() for part in values.split(","))):
        arguments.append(_value(text))
    libc.snprintf(buffer, ctypes.c_size_t(4096), form.encode(), *arguments)
    return buffer.value.decode()


def _value(text: str):
    if text[0] == '"':
        return ctypes.c_char_p(text.strip('"').encode())
    if text[0] == "'":
        return ctypes.c_int(ord(text[1]))
    text = text.rpartition(")")[2]
    number = text.rstrip("ul")
    if number.lower().startswith("0x"):
        return ctypes.c_longlong(int(number, 16))
    if any(c in number for c in ".e"):
        return ctypes.c_double(float(number.rstrip("f")))
    return ctypes.c_longlong(int(number))


def test_formats_are_those_of_the_host(program, capfd):
    lines = "\n".join(f'printf("{form}\\n"{", " * bool(values)}{values});' for form, values in FORMATS)
    loaded = program('extern "C" __global__ void k() {\n' + lines + "\n}")
    loaded.launch("k", 1, 1)
    assert loaded.synchronize() == driver.CUresult.CUDA_SUCCESS
    assert [_expected(*one) for one in FORMATS] == capfd.readouterr().out.splitlines()


def test_every_thread_prints_and_output_waits_for_a_synchronization(program, capfd):
    source = 'extern "C" __global__ void k() { printf("%d %d\\n", (int)blockIdx.x, (int)threadIdx.x); }'
    loaded = program(source)
    loaded.launch("k", 2, 3)
    assert "" == capfd.readouterr().out
    loaded.synchronize()
    expected = [f"{block} {thread}" for block in range(2) for thread in range(3)]
    assert expected == sorted(capfd.readouterr().out.splitlines())


def test_printf_returns_the_number_of_arguments(program):
    loaded = program(
        'extern "C" __global__ void k(int *out) {\n'
        '  out[0] = printf("%d %s\\n", 1, "x"); out[1] = printf("none\\n");\n'
        "  out[2] = printf((const char *)0, 1);\n"
        "}"
    )
    out = loaded.upload(np.zeros(3, np.int32))
    loaded.launch("k", 1, 1, out)
    assert [2, 0, -1] == loaded.download(out, 3, np.int32).tolist()


def test_a_full_buffer_keeps_the_latest_output(program, capfd):
    loaded = program('extern "C" __global__ void k(int n) { for (int i = 0; i < n; i++) printf("%d\\n", i); }')
    assert driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE, 1024)[0] == 0
    loaded.launch("k", 1, 1, np.int32(1000))
    loaded.synchronize()
    lines = capfd.readouterr().out.splitlines()
    assert 0 < len(lines) < 1000
    assert [str(i) for i in range(1000 - len(lines), 1000)] == lines


def test_the_buffer_cannot_be_resized_once_a_kernel_printed(program):
    loaded = program('extern "C" __global__ void k() { printf("x"); }')
    loaded.launch("k", 1, 1)
    (status,) = driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 16)
    assert driver.CUresult.CUDA_ERROR_INVALID_VALUE == status


# ---- what ends a kernel ----

ASSERTING = r"""
extern "C" __global__ void k(int *out, int bad)
{
    int i = (blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    assert(i != bad);
    out[i] = 1;
}
"""


def test_a_failed_assertion_is_reported_as_on_a_gpu_and_ends_the_context(program, capfd):
    loaded = program(ASSERTING)
    out = loaded.upload(np.zeros(64, np.int32))
    loaded.launch("k", 2, (8, 4), out, np.int32(9))
    error = driver.CUresult.CUDA_ERROR_ASSERT
    assert error == loaded.synchronize()
    line = "kernel.cu:5: void k(int *, int): block: [0,0,0], thread: [1,1,0] Assertion `i != bad` failed."
    assert [line] == capfd.readouterr().err.splitlines()
    assert error == loaded.launch("k", 1, 1, out, np.int32(-1))
    assert error == driver.cuMemAlloc(16)[0]


def test_assertions_that_hold_change_nothing(program, capfd):
    loaded = program(ASSERTING)
    out = loaded.upload(np.zeros(64, np.int32))
    loaded.launch("k", 2, 32, out, np.int32(-1))
    assert [1] * 64 == loaded.download(out, 64, np.int32).tolist()
    assert "" == capfd.readouterr().err


@pytest.mark.parametrize("statement", ["__trap();", 'asm("trap;");'])
def test_a_trap_is_a_launch_failure_that_stays(program, statement):
    loaded = program('extern "C" __global__ void k(int t) { if (threadIdx.x == t) { ' + statement + " } }")
    loaded.launch("k", 1, 64, np.int32(64))
    assert driver.CUresult.CUDA_SUCCESS == loaded.synchronize()
    loaded.launch("k", 1, 64, np.int32(63))
    assert driver.CUresult.CUDA_ERROR_LAUNCH_FAILED == loaded.synchronize()
    assert driver.CUresult.CUDA_ERROR_LAUNCH_FAILED == loaded.synchronize()


def test_threads_may_exit_anywhere(program):
    loaded = program(
        '__device__ __noinline__ void leave(int i) { if (i % 3 == 0) asm volatile("exit;"); }\n'
        'extern "C" __global__ void k(int *out) {\n'
        "  int i = threadIdx.x; out[i] = 1;\n"
        "  leave(i); __syncthreads(); out[i] += 1;\n"
        "  if (i % 2) return;\n"
        "  __syncthreads(); out[i] += 1;\n"
        "}"
    )
    out = loaded.upload(np.zeros(70, np.int32))
    loaded.launch("k", 1, 70, out)
    expected = [1 if i % 3 == 0 else 2 if i % 2 else 3 for i in range(70)]
    assert expected == loaded.download(out, 70, np.int32).tolist()


# ---- memory from the device's heap ----

LISTS = r"""
struct Node { int value; Node *next; };
extern "C" __global__ void build(Node **heads, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    Node *head = nullptr;
    for (int k = 0; k < n; k++) {
        Node *one = (Node *)malloc(sizeof(Node));
        one->value = i * n + k; one->next = head; head = one;
    }
    heads[i] = head;
}
extern "C" __global__ void sum(Node **heads, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int total = 0;
    for (Node *one = heads[i]; one;) { total += one->value; Node *next = one->next; free(one); one = next; }
    out[i] = total;
}
extern "C" __global__ void fill(char **out, unsigned long long size) {
    out[threadIdx.x] = (char *)malloc(size);
    if (out[threadIdx.x]) { out[threadIdx.x][0] = 1; out[threadIdx.x][size - 1] = 1; }
}
extern "C" __global__ void drop(char **out) { free(out[threadIdx.x]); }
extern "C" __global__ void objects(int *out) {
    struct Pair { int a, b; };
    Pair *pairs = new Pair[3];
    for (int i = 0; i < 3; i++) pairs[i] = {i, 10 * i};
    *out = pairs[2].a + pairs[2].b + (((unsigned long long)pairs & 15) != 0);
    delete[] pairs;
}
"""


def test_blocks_from_malloc_outlive_their_kernel(program):
    loaded = program(LISTS)
    heads, out = loaded.upload(np.zeros(96, np.uint64)), loaded.upload(np.zeros(96, np.int32))
    for _ in range(3):
        loaded.launch("build", 3, 32, heads, np.int32(5))
        loaded.launch("sum", 3, 32, heads, out)
        expected = [sum(range(5 * i, 5 * i + 5)) for i in range(96)]
        assert expected == loaded.download(out, 96, np.int32).tolist()


def test_malloc_returns_null_when_the_heap_is_full_and_memory_comes_back(program):
    loaded = program(LISTS)
    assert driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE, 1 << 20)[0] == 0
    out = loaded.upload(np.zeros(64, np.uint64))
    for _ in range(4):
        loaded.launch("fill", 1, 64, out, np.uint64(100_000))
        blocks = loaded.download(out, 64, np.uint64)
        assert 10 == np.count_nonzero(blocks)
        loaded.launch("drop", 1, 64, out)
    loaded.launch("fill", 1, 1, out, np.uint64(1 << 20))
    assert loaded.download(out, 1, np.uint64)[0]


def test_new_and_delete(program):
    loaded = program(LISTS)
    out = loaded.upload(np.zeros(1, np.int32))
    loaded.launch("objects", 1, 1, out)
    assert [22] == loaded.download(out, 1, np.int32).tolist()


def test_freeing_twice_fails_the_launch(program):
    loaded = program(LISTS)
    out = loaded.upload(np.zeros(1, np.uint64))
    loaded.launch("fill", 1, 1, out, np.uint64(64))
    loaded.launch("drop", 1, 1, out)
    assert driver.CUresult.CUDA_SUCCESS == loaded.synchronize()
    loaded.launch("drop", 1, 1, out)
    assert driver.CUresult.CUDA_ERROR_LAUNCH_FAILED == loaded.synchronize()


def test_long_specifications_and_huge_widths_stay_within_the_text(program, capfd):
    flags = "-+ #0" * 8
    source = f"""extern "C" __global__ void k() {{
        printf("%{flags}*.*lld|\\n", -2147483647, 2147483647, 5ll);
        printf("%{flags}{"9" * 100}.{"9" * 100}f|\\n", 1.0);
        printf("%*.*e", 2147483647, 2147483647, 1.0);
        printf("\\nend\\n");
    }}"""
    loaded = program(source)
    loaded.launch("k", 1, 1)
    assert loaded.synchronize() == driver.CUresult.CUDA_SUCCESS
    output = capfd.readouterr().out
    assert len(output) < 4 << 16
    assert output.endswith("\nend\n")
