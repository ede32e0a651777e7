// What PyTorch's caching allocator does, in the log of _cupti.c. It is built on the user's machine against the PyTorch
// that the program imports (cudatool/collect/torch_build.py).
//
// A row has the stack of the Python code that allocates. While a node of the backward graph runs, that is the stack of
// the forward operator: autograd numbers operators and nodes alike. No operator's tensors are looked at.
#include <Python.h>

#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>

namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

// Of _cupti.c: the number of this thread's Python stack, 0 for none; and a new row. Neither takes the interpreter's lock,
// for which a thread may wait that holds the allocator's.
struct Log {
  uint32_t (*stack_here)();
  void (*note)(uint16_t what, uint32_t device, uint32_t stack, const uint64_t* words);
};
const Log* the_log = nullptr;
constexpr uint16_t BLOCK = 0xFF10;

bool enabled = false;
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
std::atomic<uint32_t> backward_stack{0};  // of the call that runs the backward graph
std::atomic<int> captures{0};             // in progress

// The stacks of the latest forward operators, at a place given by thread and sequence number.
struct Forward {
  uint64_t thread, sequence;
  uint32_t stack;
};
std::mutex lock;  // of these
std::array<Forward, 1 << 16> forward{};
Forward& forward_at(uint64_t thread, uint64_t sequence) { return forward[(sequence ^ thread << 12) % forward.size()]; }

struct Thread {
  int depth = 0;        // of operators in operators
  uint32_t stack = 0;   // of the outermost, 0 where not asked yet
  int nodes = 0;        // of the backward graph, in one another
  uint32_t forward = 0; // stack of the innermost one's forward operator
};
thread_local Thread self;

uint32_t stack() {
  uint32_t found = self.nodes ? self.forward : the_log->stack_here();
  return found ? found : backward_stack.load(std::memory_order_relaxed);
}

struct InNode : at::ObserverContext {
  uint32_t outer = self.forward;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
  uint64_t sequence = uint64_t(fn.seqNr());
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    auto context = std::make_unique<InNode>();
    std::lock_guard<std::mutex> guard(lock);
    const Forward& known = forward_at(fn.forwardThreadId(), sequence);
    if (known.thread == fn.forwardThreadId() && known.sequence == sequence) self.forward = known.stack;
    self.nodes++;
    return context;
  }
  if (!self.depth++) self.stack = 0;
  if (fn.seqNr() < 0 || self.nodes) return nullptr;  // autograd makes no node of it
  if (!self.stack) self.stack = the_log->stack_here();
  uint64_t thread = at::RecordFunction::currentThreadId();
  std::lock_guard<std::mutex> guard(lock);
  forward_at(thread, sequence) = {thread, sequence, self.stack};
  return nullptr;
}

void end(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    if (!--self.nodes) self.forward = 0;
    else if (context) self.forward = static_cast<InNode*>(context)->outer;
  } else {
    self.depth--;
  }
}

// Called with the allocator's lock held.
void on_memory(const TraceEntry& entry) {
  if (!enabled || entry.action_ == TraceEntry::SNAPSHOT) return;
  auto stream = reinterpret_cast<cudaStream_t>(entry.stream_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (captures.load(std::memory_order_relaxed) && cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  uint64_t words[8] = {uint64_t(entry.action_), uint64_t(entry.addr_), entry.size_, reinterpret_cast<uint64_t>(stream),
                       status != cudaStreamCaptureStatusNone, entry.mempool_.first, entry.mempool_.second};
  uint32_t at = entry.action_ == TraceEntry::FREE_COMPLETED ? 0 : stack();
  the_log->note(BLOCK, uint32_t(entry.device_), at, words);
}

PyObject* py_start(PyObject*, PyObject* capsule) {
  the_log = static_cast<const Log*>(PyCapsule_GetPointer(capsule, "cudatool.collect._cupti.log"));
  if (!the_log) return nullptr;
  callback = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes(
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  enabled = true;
  Py_RETURN_NONE;
}

// Once CUDA is initialized: before, there are no allocators. Other allocators than the caching one refuse.
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

PyObject* py_stop(PyObject*, PyObject*) {
  enabled = false;
  if (callback != at::INVALID_CALLBACK_HANDLE) at::removeCallback(callback);
  callback = at::INVALID_CALLBACK_HANDLE;
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject*) {  // in a forked child
  enabled = false;
  Py_RETURN_NONE;
}

PyObject* py_backward(PyObject*, PyObject* begins) {
  backward_stack = PyObject_IsTrue(begins) == 1 && the_log ? the_log->stack_here() : 0;
  Py_RETURN_NONE;
}

PyObject* py_capture(PyObject*, PyObject* begins) {
  captures += PyObject_IsTrue(begins) == 1 ? 1 : -1;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", py_start, METH_O, "start(log): watch from now on; the log is that of _cupti"},
    {"watch_memory", py_watch_memory, METH_NOARGS, "watch_memory(): watch the caching allocators, from now on"},
    {"stop", py_stop, METH_NOARGS, "stop(): watch no more"},
    {"forget", py_forget, METH_NOARGS, "forget(): log nothing more in this process"},
    {"backward", py_backward, METH_O, "backward(begins): the backward graph is run from here, or is no longer"},
    {"capture", py_capture, METH_O, "capture(begins): a graph is captured from now on, or is no longer"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_blocks", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_torch_blocks() { return PyModule_Create(&module); }
