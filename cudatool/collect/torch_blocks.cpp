// Records what PyTorch's caching allocator does in the log of _cupti.c. It is built on the user's machine against the
// PyTorch that the program imports (cudatool/collect/torch_build.py).
//
// A row has the stack of the Python code that allocates, and with it the module that is called. While a node of the
// backward graph runs, that is the stack of the forward operator for which autograd made the node; of a function that
// torch.compile generated, it is that of the generated code, whose lines are known (torch_generated.py). No operator is
// observed, and no tensor is inspected: PyTorch's own way (RecordFunction for operators) made steps of small operators
// take 1.15 times as long.
#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#endif
#include <link.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/python_function.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

#include "_log_rows.h"
#include "torch_shared.h"

namespace {

const Log* the_log = nullptr;
constexpr uint32_t HERE = -1;  // for the stack of a row: this thread's

bool enabled = false;
std::atomic<uint32_t> backward_stack{0};  // of the call that runs the backward graph
std::atomic<int> captures{0};             // in progress

// The stacks of the latest forward operators, each at a place given by the thread and the sequence number of its node,
// below what else is known of these.
std::array<std::atomic<uint64_t>, 1 << 16> forward{};
std::atomic<uint64_t>& forward_at(uint64_t thread, uint64_t sequence) { return forward[(sequence ^ thread << 12) % forward.size()]; }
uint64_t rest_of(uint64_t thread, uint64_t sequence) { return (sequence / forward.size() << 16 ^ thread) << 32; }

// The Python object of a node; PyTorch 2.13 and earlier ones keep it in different places.
template <class Node>
auto object_of(const Node& node, int) -> decltype(node.pyobj()) { return node.pyobj(); }
template <class Node>
auto object_of(const Node& node, long) -> decltype(node.obj) { return node.obj; }

// Whether a node runs the backward graph that torch.compile generated.
bool is_generated(const torch::autograd::Node& node) {
  if (!is_of_python(node)) return false;
  static constexpr char NAME[] = "CompiledFunctionBackward";  // torch._functorch._aot_autograd.runtime_wrappers
  PyObject* object = object_of(static_cast<const torch::autograd::PyNode&>(node), 0);
  return object && !strncmp(Py_TYPE(object)->tp_name, NAME, sizeof NAME - 1);
}

using Node = decltype(torch::autograd::get_current_node());

// Whether memory that is taken while a node runs is the backward pass's own. What a checkpoint computes again is not.
bool is_of_backward(const Node& node) { return node && !c10::GradMode::is_enabled(); }

// The stack of memory that is taken while a node runs, 0 if it is not known.
uint32_t stack_in(const Node& node) {
  uint32_t found = is_generated(*node) ? the_log->stack_here() : 0;
  if (!found && c10::GradMode::is_enabled()) {  // a checkpoint calls its modules again, or a second derivative
    found = the_log->stack_here();
    if (!the_log->module_of(found)) found = 0;
  }
  if (!found) {
    uint64_t known = forward_at(node->thread_id(), node->sequence_nr()).load(std::memory_order_relaxed);
    if (known >> 32 == rest_of(node->thread_id(), node->sequence_nr()) >> 32) found = uint32_t(known);
  }
  return found;
}

// The stack of memory that is taken here, where `node` runs, if one does.
uint32_t stack(const Node& node) {
  uint32_t found = node ? stack_in(node) : the_log->stack_here();
  return found ? found : backward_stack.load(std::memory_order_relaxed);
}

// autograd numbers each node that it makes with this function. Libraries call it through the address in a slot of
// their own, which the dynamic linker has filled in; while PyTorch is watched, the slots hold the address of
// `numbered`.
constexpr const char* NUMBER = "_ZN2at15sequence_number17get_and_incrementEv";
uint64_t (*const next_number)() = &at::sequence_number::get_and_increment;
#ifdef __aarch64__
constexpr int CALL_SLOT = R_AARCH64_JUMP_SLOT, ADDRESS_SLOT = R_AARCH64_GLOB_DAT;
#else
constexpr int CALL_SLOT = R_X86_64_JUMP_SLOT, ADDRESS_SLOT = R_X86_64_GLOB_DAT;
#endif

std::atomic<bool> saw_node{false};

uint64_t numbered() {
  uint64_t sequence = next_number();
  if (!saw_node.load(std::memory_order_relaxed)) saw_node = true;
  if (!enabled) return sequence;
  uint32_t made_at = the_log->stack_here();
  if (!made_at) made_at = stack(torch::autograd::get_current_node());  // a node of a second backward pass, in a thread of autograd's
  uint64_t thread = at::RecordFunction::currentThreadId();
  forward_at(thread, sequence).store(rest_of(thread, sequence) | made_at, std::memory_order_relaxed);
  return sequence;
}

// Put the address `target` into every slot of one library for the function.
int fill_slots(dl_phdr_info* library, size_t, void* target) {
  const ElfW(Dyn)* dynamic = nullptr;
  ElfW(Addr) base = library->dlpi_addr, read_only = 0, read_only_end = 0, own = reinterpret_cast<ElfW(Addr)>(&numbered);
  for (int i = 0; i < library->dlpi_phnum; i++) {
    const ElfW(Phdr)& part = library->dlpi_phdr[i];
    if (part.p_type == PT_LOAD && own - base - part.p_vaddr < part.p_memsz) return 0;
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + part.p_vaddr);
    if (part.p_type == PT_GNU_RELRO) read_only = base + part.p_vaddr, read_only_end = read_only + part.p_memsz;
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* tables[2] = {};
  size_t sizes[2] = {};
  for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
    ElfW(Addr) at = dynamic->d_un.d_ptr < base ? base + dynamic->d_un.d_ptr : dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(at);
    if (dynamic->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(at);
    if (dynamic->d_tag == DT_JMPREL) tables[0] = reinterpret_cast<const ElfW(Rela)*>(at);
    if (dynamic->d_tag == DT_RELA) tables[1] = reinterpret_cast<const ElfW(Rela)*>(at);
    if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_RELASZ) sizes[1] = dynamic->d_un.d_val;
  }
  if (!symbols || !names) return 0;
  for (int i = 0; i < 2; i++) {
    for (size_t k = 0; tables[i] && k < sizes[i] / sizeof(ElfW(Rela)); k++) {
      const ElfW(Rela)& entry = tables[i][k];
      if (ELF64_R_TYPE(entry.r_info) != CALL_SLOT && ELF64_R_TYPE(entry.r_info) != ADDRESS_SLOT) continue;
      if (strcmp(names + symbols[ELF64_R_SYM(entry.r_info)].st_name, NUMBER)) continue;
      auto slot = reinterpret_cast<void**>(base + entry.r_offset);
      ElfW(Addr) page_size = ElfW(Addr)(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<ElfW(Addr)>(slot);
      auto page = reinterpret_cast<void*>(at & ~(page_size - 1));
      bool is_read_only = read_only <= at && at < read_only_end;
      if (is_read_only && mprotect(page, page_size, PROT_READ | PROT_WRITE)) continue;
      __atomic_store_n(slot, target, __ATOMIC_RELEASE);
      if (is_read_only) mprotect(page, page_size, PROT_READ);
    }
  }
  return 0;
}

unsigned long long libraries = 0;  // that had been loaded when their slots were filled

int count_libraries(dl_phdr_info* library, size_t, void* count) {
  *static_cast<unsigned long long*>(count) = library->dlpi_adds;
  return 1;
}

void watch_nodes() {
  unsigned long long count = 0;
  dl_iterate_phdr(count_libraries, &count);
  if (count == libraries) return;
  libraries = count;
  dl_iterate_phdr(fill_slots, reinterpret_cast<void*>(&numbered));
}

// Check whether autograd's nodes are seen by making one.
bool sees_nodes() {
  saw_node = false;
  try {
    c10::AutoGradMode with_gradients(true);
    at::Tensor empty = at::empty({0});
    empty.requires_grad_(true).mul(empty);
  } catch (const std::exception&) {
    return false;
  }
  return saw_node;
}

#ifdef WITH_CUDA
using c10::cuda::CUDACachingAllocator::TraceEntry;

// Called with the allocator's lock held.
void on_memory(const TraceEntry& entry) {
  if (!enabled) return;
  if (entry.action_ == TraceEntry::SNAPSHOT) {  // what is in the snapshot happened before this row, all else after it
    uint64_t words[8] = {uint64_t(entry.action_)};
    the_log->note(BLOCK, uint32_t(entry.device_), 0, words);
    return;
  }
  auto stream = reinterpret_cast<cudaStream_t>(entry.stream_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (captures.load(std::memory_order_relaxed) && cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  auto pool = pool_of(entry);
  uint64_t words[8] = {uint64_t(entry.action_), uint64_t(entry.addr_), entry.size_, reinterpret_cast<uint64_t>(stream),
                       status != cudaStreamCaptureStatusNone, pool.first, pool.second, 0};
  if (entry.action_ == TraceEntry::FREE_COMPLETED) {
    the_log->note_released(uint32_t(entry.device_), words);
    return;
  }
  Node node = torch::autograd::get_current_node();
  words[7] = is_of_backward(node);
  uint32_t at = node || backward_stack.load(std::memory_order_relaxed) ? stack(node) : HERE;
  the_log->note(BLOCK, uint32_t(entry.device_), at, words);
}
#endif

PyObject* py_start(PyObject*, PyObject* capsule) {
  the_log = static_cast<const Log*>(PyCapsule_GetPointer(capsule, "cudatool.collect._cupti.log"));
  if (!the_log) return nullptr;
  watch_nodes();
  bool sees = sees_nodes();
  enabled = true;
  return PyBool_FromLong(sees);
}

#ifdef WITH_CUDA
// Call once CUDA is initialized: before, there are no allocators. Allocators other than the caching one refuse.
PyObject* py_watch_memory(PyObject*, PyObject*) {
  static bool once = false;
  try {
    if (!once) c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(on_memory);
    once = true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}
#endif

PyObject* py_stop(PyObject*, PyObject*) {
  enabled = false;
  dl_iterate_phdr(fill_slots, reinterpret_cast<void*>(next_number));
  libraries = 0;
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject*) {  // in a forked child
  enabled = false;
  Py_RETURN_NONE;
}

PyObject* py_backward(PyObject*, PyObject* begins) {
  bool is_begin = PyObject_IsTrue(begins) == 1 && enabled;
  if (is_begin) watch_nodes();  // of libraries that were loaded since
  backward_stack = is_begin ? the_log->stack_here() : 0;
  Py_RETURN_NONE;
}

PyObject* py_stack(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLong(enabled ? stack(torch::autograd::get_current_node()) : 0);
}

PyObject* py_is_of_backward(PyObject*, PyObject*) { return PyBool_FromLong(is_of_backward(torch::autograd::get_current_node())); }

PyObject* py_capture(PyObject*, PyObject* begins) {
  captures += PyObject_IsTrue(begins) == 1 ? 1 : -1;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", py_start, METH_O,
     "start(log): watch from now on; the log is that of _cupti. Return whether forward operators will be known"},
#ifdef WITH_CUDA
    {"watch_memory", py_watch_memory, METH_NOARGS, "watch_memory(): watch the caching allocators, from now on"},
#endif
    {"is_of_backward", py_is_of_backward, METH_NOARGS, "is_of_backward(): whether a block made here is the backward pass's"},
    {"stack", py_stack, METH_NOARGS, "stack(): the number of the stack that a block made here has"},
    {"stop", py_stop, METH_NOARGS, "stop(): watch no more"},
    {"forget", py_forget, METH_NOARGS, "forget(): log nothing more in this process"},
    {"backward", py_backward, METH_O, "backward(begins): the backward graph is run from here, or is no longer"},
    {"capture", py_capture, METH_O, "capture(begins): a graph is captured from now on, or is no longer"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_blocks", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_torch_blocks() { return PyModule_Create(&module); }
