// Records what a PyTorch program does on the device as a log of 64-bit words. It is built on the user's machine against
// the PyTorch that the program imports (cudatool/collect/torch_build.py) and read by cudatool/collect/torch_rows.py,
// which holds the layout of the rows.
//
// Three sources, all in order:
//   operators            a kernel for each of them at the dispatch key BackendSelect (see "operators" below)
//   streams and events   PyTorch's GPU trace: the functions that it calls at each event, wait and synchronization
//   memory               the caching allocator's trace tracker
//
// In which node of the backward graph they happen, autograd is asked. Recording an operator takes about a microsecond.
// Its accesses (the payload) are written once and then referred to by number: a training step repeats the same
// operators on the same memory.
#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_shared.h"

c10::impl::PyInterpreter* getPyInterpreter();  // of libtorch_python

namespace {

using Words = std::vector<uint64_t>;

enum Row : uint64_t { BEGIN = 1, CALL, PAYLOAD, MEMORY, TRACE, NOTE, STREAM };
enum : uint64_t { MEMORY_WORDS = 8, FREED = 16 };  // the latter is not one of the allocator's actions
enum Trace : uint64_t {
  EVENT_DELETION = 1, EVENT_RECORD, EVENT_WAIT, EVENT_SYNCHRONIZE, STREAM_SYNCHRONIZE, DEVICE_SYNCHRONIZE
};

struct Hash {
  // Four sums at once: one alone would wait for each multiplication.
  size_t operator()(const Words& words) const {
    uint64_t sums[4] = {14695981039346656037ull, 1, 2, 3};
    for (size_t i = 0; i < words.size(); i++) sums[i % 4] = (sums[i % 4] ^ words[i] ^ words[i] >> 29) * 1099511628211ull;
    uint64_t hash = words.size();
    for (uint64_t sum : sums) hash = (hash ^ sum ^ sum >> 29) * 1099511628211ull;
    return hash;
  }
};

// The known properties of an operator.
struct Op {
  const c10::FunctionSchema* schema;
  uint64_t index;         // index in the table of names
  bool ignored;           // touches no elements, or is made of other operators that are seen themselves
  bool differentiable;    // may get a node of the backward graph
  bool copies;            // between memories: tensors of the host count as well
  int non_blocking = -1;  // position of that argument
};

constexpr size_t MOST_PAYLOADS = 1 << 18;  // kept to be found again
constexpr size_t PAYLOAD_HEAD = 4;  // operator, node, extra, number of tensors
constexpr size_t TENSOR_HEAD = 5;   // words of a tensor before its sizes and strides

const Log* driver_log = nullptr;  // where the driver's calls are not logged: none

bool enabled = false;
c10::DeviceType watched = c10::DeviceType::CUDA;
PyObject* capture_stack = nullptr;  // Python: () -> id of the caller's stack
PyObject* new_thread = nullptr;     // Python: () -> id of this thread
std::unordered_set<std::string> idle;  // operators that touch no elements: their names

std::mutex lock;  // of what follows
Words rows;
size_t last = 0;  // where the last one begins
unsigned long long most_words = 8 << 20;  // of rows in memory; then they go to a file
FILE* spilled = nullptr;            // rows that went to a file, in chunks
std::vector<size_t> chunks;         // words of each
size_t spilled_words = 0;           // of all
size_t next_chunk = 0, offset = 0;  // to be drained, and where it lies
std::unordered_map<Words, uint64_t, Hash> payloads;
uint64_t payload_count = 0;
std::deque<Op> ops;              // that were described: they stay where they are
std::vector<std::string> names;  // of operators, of nodes of the backward graph, and of kernels
std::unordered_map<std::string, uint64_t> name_indices;
std::unordered_map<const std::type_info*, uint64_t> node_names;  // of classes of nodes: indices
std::unordered_set<uint64_t> streams;  // seen: handles

// The stacks of the latest forward operators, at a place given by thread and sequence number (autograd numbers them).
struct Forward {
  uint64_t thread, sequence, stack;
};
std::array<Forward, 1 << 16> forward{};
Forward& forward_at(uint64_t thread, uint64_t sequence) { return forward[(sequence ^ thread << 12) % forward.size()]; }

std::unordered_map<Words, uint64_t, Hash> stacks;  // under the GIL: places of the frames -> id
std::vector<uint64_t> stack_ids;                   // under the lock: by the number that the driver's log has for a stack
std::atomic<uint64_t> call_count{0};
std::atomic<uint64_t> backward_stack{0};           // of the call that runs the backward graph

struct Thread {
  uint64_t id = 0;
  uint64_t call = 0;   // number of the operator in progress
  bool begun = false;  // whether the log has its beginning
  uint64_t node = 0;   // of the backward graph, in which the operator runs: its name
  Words payload;       // of the operator in progress: PAYLOAD_HEAD words, then its tensors
  uint64_t count = 0, extra = 0;
  uint64_t sequence = 0;  // of the latest node of the backward graph, as the operator began
  bool touches = false, has_gradient = false;
  uint64_t free_stack = 0;  // of the free in progress
  std::vector<std::array<uint64_t, MEMORY_WORDS>> allocations;  // outside of operators, to be written with their stack
};
thread_local Thread self;

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// ---- rows (the lock is held) ----

void spill() {
  if (!spilled) spilled = std::tmpfile();
  // After the last whole chunk: of one that the disk had no room for, a part may be there.
  bool is_written = spilled && !std::fseek(spilled, long(spilled_words * sizeof(uint64_t)), SEEK_SET) &&
      std::fwrite(rows.data(), sizeof(uint64_t), rows.size(), spilled) == rows.size() && !std::fflush(spilled);
  if (!is_written) {
    most_words *= 2;  // they stay in memory; not with each row that comes, but when there are many more, it is tried again
    return;
  }
  chunks.push_back(rows.size());
  spilled_words += rows.size();
  rows.clear();
}

void forget_spilled() {
  if (spilled) std::fclose(spilled);
  spilled = nullptr;
  chunks.clear();
  spilled_words = next_chunk = offset = 0;
}

void append(Row kind, std::span<const uint64_t> first, const Words& rest = {}) {
  if (self.call && !self.begun && kind != CALL && kind != PAYLOAD) {
    self.begun = true;
    append(BEGIN, std::array{self.call});
  }
  if (rows.size() >= most_words) spill();
  size_t begin = last = rows.size(), length = 2 + first.size() + rest.size();
  rows.resize(begin + length);
  rows[begin] = kind | length << 8 | self.id << 40;
  rows[begin + 1] = now();
  std::copy(first.begin(), first.end(), &rows[begin + 2]);
  std::copy(rest.begin(), rest.end(), &rows[begin + 2] + first.size());
}

void append(Row kind, std::initializer_list<uint64_t> first, const Words& rest = {}) {
  append(kind, std::span(first.begin(), first.size()), rest);
}

void see_stream([[maybe_unused]] uint64_t handle, [[maybe_unused]] int device) {
#ifdef WITH_CUDA
  if (streams.count(handle)) return;
  streams.insert(handle);
  unsigned flags = 0;
  if (handle > 2 && cudaStreamGetFlags(reinterpret_cast<cudaStream_t>(handle), &flags) != cudaSuccess) {
    cudaGetLastError();
    flags = cudaStreamNonBlocking;  // as PyTorch's own are; do not invent an order
  }
  append(STREAM, {handle, uint64_t(device), flags});
#endif
}

uint64_t current_stream([[maybe_unused]] int device) {
#ifdef WITH_CUDA
  return reinterpret_cast<uint64_t>(c10::cuda::getCurrentCUDAStream(device).stream());
#else
  return 0;
#endif
}

uint64_t name_index(const std::string& name) {
  auto [found, is_new] = name_indices.emplace(name, names.size());
  if (is_new) names.push_back(name);
  return found->second;
}

// ---- threads and Python stacks ----

void write_allocations();

void enter_thread() {
  if (!self.id) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject* id = PyObject_CallNoArgs(new_thread);
    self.id = id ? PyLong_AsUnsignedLongLong(id) : 0;
    Py_XDECREF(id);
    PyErr_Clear();
    PyGILState_Release(gil);
  }
  if (!self.allocations.empty()) write_allocations();
}

// Asks Python for the id of this thread's stack. The GIL is held.
uint64_t captured() {
  uint64_t stack = 0;
  PyObject *type, *error, *traceback;  // the operator may have failed
  PyErr_Fetch(&type, &error, &traceback);
  if (PyObject* id = PyObject_CallNoArgs(capture_stack)) {
    stack = PyLong_AsUnsignedLongLong(id);
    Py_DECREF(id);
  }
  PyErr_Clear();
  PyErr_Restore(type, error, traceback);
  return stack;
}

// The id of this thread's stack, for which the driver's log has a number: a known one needs no GIL, for which the
// operator might wait.
uint64_t numbered_stack(uint32_t number) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (number < stack_ids.size() && stack_ids[number]) return stack_ids[number];
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  uint64_t stack = captured();
  PyGILState_Release(gil);
  std::lock_guard<std::mutex> guard(lock);
  if (number >= stack_ids.size()) stack_ids.resize(2 * size_t(number) + 256);
  return stack_ids[number] = stack;
}

// The id of this thread's Python stack. Where the driver is not logged, a known stack costs one look-up by the places of
// its frames: a code object lives as long as the process once its stack has an id, and the offset of the instruction
// lies inside of it.
uint64_t python_stack() {
  if (!PyGILState_GetThisThreadState()) return 0;
  if (uint32_t number = driver_log ? driver_log->stack_here() : 0) return numbered_stack(number);
  PyGILState_STATE gil = PyGILState_Ensure();
  Words places;
  places.reserve(32);
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    places.push_back(reinterpret_cast<uint64_t>(code) + PyFrame_GetLasti(frame));
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  uint64_t stack = 0;
  auto found = stacks.find(places);
  if (found != stacks.end()) {
    stack = found->second;
  } else if (!places.empty()) {
    stack = stacks[places] = captured();
  }
  PyGILState_Release(gil);
  return stack;
}

// ---- nodes of the backward graph ----
//
// A RecordFunction callback would cost one to three microseconds more for each: PyTorch would make its name again.

uint64_t name_of(const torch::autograd::Node& node) {
  const std::type_info& type = typeid(node);
  bool has_own_name = is_of_python(node);  // such are of one class
  if (!has_own_name) {
    std::lock_guard<std::mutex> guard(lock);
    auto known = node_names.find(&type);
    if (known != node_names.end()) return known->second;
  }
  std::string name = node.name();
  std::lock_guard<std::mutex> guard(lock);
  uint64_t index = name_index(name);
  if (!has_own_name) node_names[&type] = index;
  return index;
}

// The stack of the forward operator for which autograd made the node, 0 if it is not known.
uint64_t forward_stack(const torch::autograd::Node& node) {
  uint64_t thread = node.thread_id(), sequence = node.sequence_nr();
  std::lock_guard<std::mutex> guard(lock);
  const Forward& known = forward_at(thread, sequence);
  return known.thread == thread && known.sequence == sequence ? known.stack : 0;
}

// In a backward graph the stack of the forward operator, where it is known: the engine's threads have none.
uint64_t stack() {
  auto node = torch::autograd::get_current_node();
  uint64_t found = node ? forward_stack(*node) : python_stack();
  return found ? found : backward_stack.load();
}

// ---- operators ----

// A kernel at BackendSelect runs an operator when nothing but the device's own kernel is left to run: below autograd,
// autocast, Python's modes and classes of tensors, vmap. It is called for all that runs, in each thread, with the very
// tensors on which it runs; nothing is called for operators that are made of others, and for views. RecordFunction
// would pack arguments for all of these, and the more so for operators inside of operators: three times as many.
// (Factories have a kernel there: they call other operators to fill what they make. Two do not, tril_indices and
// triu_indices: what they write is not seen.)

constexpr auto HERE = c10::DispatchKey::BackendSelect;

bool is_ignored(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  auto is_written = [](const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); };
  auto is_view = [](const c10::Argument& a) { return a.alias_info() && !a.alias_info()->isWrite(); };
  bool views = !schema.returns().empty() &&
      std::all_of(schema.returns().begin(), schema.returns().end(), is_view) &&
      std::none_of(schema.arguments().begin(), schema.arguments().end(), is_written);
  bool composed = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  // Functional collectives call those of c10d, which are operators themselves.
  const std::string& name = schema.name();
  bool functional = name.find("c10d_functional") < name.find("::");
  return views || composed || functional || idle.count(name);
}

// Operators that wait for their kernel, because PyTorch tells of a new one with its own lock held.
std::mutex new_lock;
std::vector<c10::OperatorName> new_names;
std::atomic<bool> has_new{false};

class OnNewOperator : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& handle) override {
    std::lock_guard<std::mutex> guard(new_lock);
    new_names.push_back(handle.operator_name());
    has_new = true;
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}
};

void watch_new();

const Op* describe(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  std::string name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  std::lock_guard<std::mutex> guard(lock);
  Op op{&schema, name_index(name), is_ignored(handle), handle.hasKernelForDispatchKey(c10::DispatchKey::Autograd),
        name == "aten::copy_" || name == "aten::_to_copy"};
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    if (op.copies && schema.arguments()[i].name() == "non_blocking") op.non_blocking = int(i);
  }
  return &ops.emplace_back(op);
}

bool is_pinned(const at::Tensor& tensor) {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (!data.get() || data.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter()) return false;
  return at::detail::getCUDAHooks().isPinnedPtr(data.get());
}

// Adds a tensor to the payload. What its storage says counts: the tensor may be a class of Python's that says otherwise,
// and has no memory of its own. A sparse tensor has its elements in other tensors, and a nested one has many shapes: it
// is at most all that is stored.
void add_tensor(const at::Tensor& tensor, uint64_t position, const Op& op) {
  if (!tensor.defined()) return;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  auto add_all = [&](std::initializer_list<at::Tensor> parts) {
    for (const at::Tensor& part : parts) add_tensor(part, position, op);
  };
  switch (impl.layout()) {
    case c10::kStrided:
      break;
    case c10::kSparse: {
      auto& sparse = static_cast<const at::SparseTensorImpl&>(impl);
      return add_all({sparse.indices(), sparse.values()});
    }
    case c10::kSparseCsr:
    case c10::kSparseCsc:
    case c10::kSparseBsr:
    case c10::kSparseBsc: {
      auto& sparse = static_cast<const at::SparseCsrTensorImpl&>(impl);
      return add_all({sparse.compressed_indices(), sparse.plain_indices(), sparse.values()});
    }
    default:
      return;
  }
  if (!impl.has_storage()) return;
  const c10::Storage& storage = impl.storage();
  auto start = reinterpret_cast<uint64_t>(storage.data());
  c10::Device where = storage.device();
  bool on_device = where.type() == watched && start;
  bool pinned = !on_device && where.is_cpu() && is_pinned(tensor);
  if (!on_device && !pinned && !(op.copies && where.is_cpu())) return;
  self.touches |= on_device || pinned;
  int device = std::max<int>(where.index(), 0);
  uint64_t item = impl.itemsize(), nested = impl.is_nested(), dimensions = nested ? 1 : impl.dim();
  self.payload.insert(self.payload.end(), {
      position | uint64_t(on_device) << 16 | uint64_t(pinned) << 17 | nested << 18 | uint64_t(device) << 24 | item << 32 |
          dimensions << 48,
      start + (nested ? 0 : impl.storage_offset() * item), start, storage.nbytes(), on_device ? current_stream(device) : 0});
  if (nested) {
    self.payload.insert(self.payload.end(), {storage.nbytes() / item, 1});
  } else {
    for (int64_t size : impl.sizes()) self.payload.push_back(size);
    for (int64_t stride : impl.strides()) self.payload.push_back(stride);
  }
  self.count++;
}

void add_value(const c10::IValue& value, uint64_t position, const Op& op) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    self.has_gradient |= tensor.defined() && tensor.requires_grad();
    return add_tensor(tensor, position, op);
  }
  if (!value.isList()) return;
  for (const c10::IValue& item : value.toListRef()) {
    if (!item.isTensor() && !item.isTensorList()) break;
    add_value(item, position, op);
  }
}

void begin(const Op& op, at::ArrayRef<c10::IValue> arguments) {
  enter_thread();
  self.payload.assign(PAYLOAD_HEAD, 0);
  self.count = self.extra = 0;
  self.touches = self.has_gradient = self.begun = false;
  self.sequence = at::sequence_number::peek() - 1;
  auto node = torch::autograd::get_current_node();
  self.node = node ? name_of(*node) : 0;
  uint64_t position = 0;
  for (const c10::IValue& argument : arguments) {
    add_value(argument, position, op);
    if (int(position) == op.non_blocking) self.extra = argument.isBool() && argument.toBool();
#ifdef WITH_CUDA
    if (argument.isStream()) self.extra = uint64_t(c10::cuda::CUDAStream(argument.toStream()).stream());
#endif
    position++;
  }
  self.call = ++call_count;
}

void end(const Op& op, at::ArrayRef<c10::IValue> results) {
  uint64_t position = 256;
  for (const c10::IValue& result : results) add_value(result, position++, op);
  uint64_t at = enabled && self.touches ? stack() : 0;
  std::lock_guard<std::mutex> guard(lock);
  if (enabled && self.touches) {
    Words& words = self.payload;
    words[0] = op.index, words[1] = self.node, words[2] = self.extra, words[3] = self.count;
    auto found = payloads.find(words);
    if (found == payloads.end()) {
      if (payloads.size() >= MOST_PAYLOADS) payloads.clear();
      found = payloads.emplace(words, ++payload_count).first;
      append(PAYLOAD, {payload_count}, words);
      for (size_t i = PAYLOAD_HEAD; i < words.size(); i += TENSOR_HEAD + 2 * (words[i] >> 48)) {
        if (words[i] >> 16 & 1) see_stream(words[i + 4], words[i] >> 24 & 0xff);
      }
    }
    append(CALL, {self.call, found->second, at});
    // The operator's node was made just before, and is the latest that has a number.
    if (op.differentiable && self.has_gradient && !self.node && c10::GradMode::is_enabled()) {
      uint64_t thread = at::RecordFunction::currentThreadId(), sequence = self.sequence;
      forward_at(thread, sequence) = {thread, sequence, at};
    }
  } else if (self.begun) {
    append(CALL, {self.call, 0, 0});
  }
  self.call = 0;
}

class Watched : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* values) {
    watch_new();
    c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, HERE);
    // What Python has for the keys below comes first while it dispatches, as it would have come without this kernel.
    if (c10::impl::PythonDispatcherTLS::get_state()) below = below.add(c10::DispatchKey::PythonDispatcher);
    // Operators inside of an operator are not recorded.
    const Op* op = enabled && !self.call ? described(handle) : nullptr;
    if (!op || op->ignored) return handle.redispatchBoxed(below, values);
    const Log* log = driver_log;
    if (log) log->mark_inside(1);
    try {
      begin(*op, torch::jit::last(*values, op->schema->arguments().size()));
      handle.redispatchBoxed(below, values);
    } catch (...) {
      end(*op, {});
      if (log) log->mark_inside(-1);
      throw;
    }
    end(*op, torch::jit::last(*values, op->schema->returns().size()));
    if (log) log->mark_inside(-1);
  }

 private:
  // An operator can be defined again, and get its kernels after it is defined.
  const Op* described(const c10::OperatorHandle& handle) {
    const Op* op = known.load();
    if (!op || op->schema != &handle.schema()) known = op = describe(handle);
    return op;
  }
  std::atomic<const Op*> known{nullptr};
};

// Gives new operators their kernel. It is never taken away: another thread might be about to call it.
void watch_new() {
  if (!has_new) return;
  std::vector<c10::OperatorName> taken;
  {
    std::lock_guard<std::mutex> guard(new_lock);
    taken.swap(new_names);
    has_new = false;
  }
  static auto& kernels = *new std::vector<c10::RegistrationHandleRAII>;
  static std::mutex& kernels_lock = *new std::mutex;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : taken) {
    auto handle = dispatcher.findSchema(name);
    if (!handle || is_ignored(*handle) || handle->hasKernelForDispatchKey(HERE)) continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Watched>());
    std::lock_guard<std::mutex> guard(kernels_lock);
    kernels.push_back(dispatcher.registerImpl(name, HERE, std::move(kernel), std::nullopt, nullptr, "cudatool"));
  }
}

void watch_operators() {
  static bool once = false;
  if (!once) new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<OnNewOperator>()));
  once = true;
  watch_new();
}

// ---- streams and events ----

void trace(Trace what, uint64_t first, uint64_t second) {
  if (!enabled) return;
  watch_new();
  enter_thread();
  uint64_t at = what == EVENT_DELETION ? 0 : stack();
  std::lock_guard<std::mutex> guard(lock);
  int device = 0;
#ifdef WITH_CUDA
  device = c10::cuda::current_device();
  if (what == EVENT_RECORD || what == EVENT_WAIT) see_stream(second, device);
  if (what == STREAM_SYNCHRONIZE) see_stream(first, device);
#endif
  append(TRACE, {what, first, second, uint64_t(device), at});
}

using VTable = c10::impl::PyInterpreterVTable;

// Replaces an entry in a copy of a table of virtual functions. A pointer to a virtual member function holds the
// entry's place (Itanium C++ ABI, 2.3); a member function is called like a function whose first argument is the object.
template <typename Member, typename Function>
size_t replace(std::vector<void*>* table, Member member, Function* function) {
  ptrdiff_t words[2];
  static_assert(sizeof(member) == sizeof(words));
  std::memcpy(words, &member, sizeof(words));
#ifdef __aarch64__
  size_t entry = words[0] / sizeof(void*);
#else
  size_t entry = (words[0] - 1) / sizeof(void*);
#endif
  if (table) (*table)[entry] = reinterpret_cast<void*>(function);
  return entry;
}

template <Trace what>
void on_one(const VTable*, c10::DeviceType, uintptr_t handle) { trace(what, handle, 0); }
template <Trace what>
void on_two(const VTable*, c10::DeviceType, uintptr_t event, uintptr_t stream) { trace(what, event, stream); }
template <Trace what>
void on_none(const VTable*, c10::DeviceType) { trace(what, 0, 0); }
void on_nothing(const VTable*, c10::DeviceType, uintptr_t) {}

// Called when an allocation is complete, without the allocator's lock.
void on_allocation(const VTable*, c10::DeviceType, uintptr_t) {
  if (!self.allocations.empty()) enter_thread();
}

// Called just before the allocator takes its lock: later the stack cannot be read (on_memory). Inside an operator the
// free has the operator's stack.
void on_free(const VTable*, c10::DeviceType, uintptr_t) { self.free_stack = enabled && !self.call ? stack() : 0; }

// PyTorch traces the GPU through its interpreter object, in Python: microseconds for each allocation. It gets a copy
// of that object instead, in which only these functions differ.
void trace_gpu() {
  static std::vector<void*> table;
  static void** object;
  static c10::impl::PyInterpreter* interpreter;
  if (interpreter) return;
  size_t entries = replace(nullptr, &VTable::reset_backward_hooks, (void*)nullptr) + 1;  // the last one
  entries = std::max(entries, replace(nullptr, &VTable::trace_gpu_event_synchronization, (void*)nullptr) + 1);
  const VTable* original = getPyInterpreter()->vtable_;
  void** from = *reinterpret_cast<void** const*>(original);
  table.assign(from, from + entries);
  replace(&table, &VTable::trace_gpu_event_creation, &on_nothing);
  replace(&table, &VTable::trace_gpu_event_deletion, &on_one<EVENT_DELETION>);
  replace(&table, &VTable::trace_gpu_event_record, &on_two<EVENT_RECORD>);
  replace(&table, &VTable::trace_gpu_event_wait, &on_two<EVENT_WAIT>);
  replace(&table, &VTable::trace_gpu_event_synchronization, &on_one<EVENT_SYNCHRONIZE>);
  replace(&table, &VTable::trace_gpu_stream_creation, &on_nothing);
  replace(&table, &VTable::trace_gpu_stream_synchronization, &on_one<STREAM_SYNCHRONIZE>);
  replace(&table, &VTable::trace_gpu_device_synchronization, &on_none<DEVICE_SYNCHRONIZE>);
  replace(&table, &VTable::trace_gpu_memory_allocation, &on_allocation);
  replace(&table, &VTable::trace_gpu_memory_deallocation, &on_free);
  object = table.data();
  interpreter = new c10::impl::PyInterpreter(reinterpret_cast<const VTable*>(&object));
  c10::impl::GPUTrace::set_trace(interpreter);
}

// ---- memory ----

void write_allocations() {
  uint64_t at = stack();
  std::lock_guard<std::mutex> guard(lock);
  for (auto& words : self.allocations) {
    words[6] = at;
    see_stream(words[3], int(words[4]));
    append(MEMORY, words);
  }
  self.allocations.clear();
}

#ifdef WITH_CUDA
// Whether the last row is this thread's, and asks for the free that is complete now.
bool is_asked_for(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  if (last + 2 + MEMORY_WORDS != rows.size() || rows[last] != (MEMORY | (2 + MEMORY_WORDS) << 8 | self.id << 40)) return false;
  return rows[last + 2] == c10::cuda::CUDACachingAllocator::TraceEntry::FREE_REQUESTED && rows[last + 3] == uint64_t(entry.addr_) &&
         rows[last + 6] == uint64_t(entry.device_);
}

// Called with the allocator's lock held: the stack must not be read here, because the thread with the GIL may wait for
// that lock. An allocation uses its operator's stack, or is written a little later; a free has stored one before.
void on_memory(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  if (!enabled) return;
  watch_new();
  using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
  auto stream = reinterpret_cast<uint64_t>(entry.stream_);
  auto pool = pool_of(entry);
  std::array<uint64_t, MEMORY_WORDS> words = {
      uint64_t(entry.action_), entry.addr_, entry.size_, stream, uint64_t(entry.device_), self.call,
      entry.action_ == Entry::FREE_REQUESTED ? self.free_stack : 0,
      (pool.first & 0xFFFFFFFF) | pool.second << 32};  // pack_pool
  if (!self.call && (entry.action_ == Entry::ALLOC || entry.action_ == Entry::SEGMENT_ALLOC || entry.action_ == Entry::SEGMENT_MAP)) {
    self.allocations.push_back(words);
    return;
  }
  std::lock_guard<std::mutex> guard(lock);
  if (entry.action_ == Entry::FREE_COMPLETED && is_asked_for(entry)) {
    rows[last + 2] = FREED;  // mostly: one row for both
    return;
  }
  see_stream(stream, entry.device_);
  append(MEMORY, words);
}

#endif

// ---- Python ----

PyObject* py_start(PyObject*, PyObject* arguments) {
  const char* device;
  PyObject *stack_function, *thread_function, *idle_names;
  if (!PyArg_ParseTuple(arguments, "sOOO!|K", &device, &stack_function, &thread_function, &PyTuple_Type, &idle_names, &most_words)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(idle_names); i++) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(idle_names, i));
    if (!name) return nullptr;
    idle.insert(name);
  }
  capture_stack = Py_NewRef(stack_function);
  new_thread = Py_NewRef(thread_function);
  watched = std::strcmp(device, "cpu") ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  if (names.empty()) name_index("");  // 0 is no name
  {
    std::lock_guard<std::mutex> guard(lock);  // a new reader has seen nothing yet
    payloads.clear();
    streams.clear();
    rows.clear();
    stack_ids.clear();
    forget_spilled();
  }
  stacks.clear();
  trace_gpu();
  watch_operators();
  enabled = true;
  Py_RETURN_NONE;
}

// Call once CUDA is initialized: before, there are no allocators. Allocators other than the caching one refuse.
PyObject* py_watch_memory(PyObject*, PyObject*) {
#ifdef WITH_CUDA
  static bool once = false;
  try {
    if (!once) c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(on_memory);
    once = true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
#endif
  Py_RETURN_NONE;
}

PyObject* py_mark_operators(PyObject*, PyObject* capsule) {
  driver_log = static_cast<const Log*>(PyCapsule_GetPointer(capsule, "cudatool.collect._cupti.log"));
  if (!driver_log) return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_stop(PyObject*, PyObject*) {
  enabled = false;
  driver_log = nullptr;
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject*) {  // in a forked child, another thread of whose parent may have held the lock
  enabled = false;
  Py_RETURN_NONE;
}

PyObject* py_note(PyObject*, PyObject* arguments) {
  Words words;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
    words.push_back(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(arguments, i)));
  }
  if (PyErr_Occurred()) return nullptr;
  if (!enabled) Py_RETURN_NONE;
  enter_thread();
  uint64_t at = stack();
  std::lock_guard<std::mutex> guard(lock);
  append(NOTE, {at}, words);
  Py_RETURN_NONE;
}

PyObject* py_name(PyObject*, PyObject* text) {
  const char* name = PyUnicode_AsUTF8(text);
  if (!name) return nullptr;
  std::lock_guard<std::mutex> guard(lock);
  return PyLong_FromUnsignedLongLong(name_index(name));
}

PyObject* py_stream(PyObject*, PyObject* arguments) {
  int device;
  if (!PyArg_ParseTuple(arguments, "i", &device)) return nullptr;
  uint64_t handle = current_stream(device);
  enter_thread();
  std::lock_guard<std::mutex> guard(lock);
  if (enabled) see_stream(handle, device);
  return PyLong_FromUnsignedLongLong(handle);
}

PyObject* py_backward_from(PyObject*, PyObject* stack_id) {
  backward_stack = PyLong_AsUnsignedLongLong(stack_id);
  Py_RETURN_NONE;
}

PyObject* py_drain(PyObject*, PyObject*) {
  Words taken;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (next_chunk < chunks.size()) {
      taken.resize(chunks[next_chunk++]);
      std::fseek(spilled, long(offset * sizeof(uint64_t)), SEEK_SET);
      taken.resize(std::fread(taken.data(), sizeof(uint64_t), taken.size(), spilled));
      offset += taken.size();
      if (next_chunk == chunks.size()) forget_spilled();
    } else {
      taken.swap(rows);
    }
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(taken.data()), taken.size() * sizeof(uint64_t));
}

PyObject* py_names(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> guard(lock);
  PyObject* list = PyList_New(names.size());
  for (size_t i = 0; list && i < names.size(); i++) PyList_SET_ITEM(list, i, PyUnicode_FromString(names[i].c_str()));
  return list;
}

PyMethodDef methods[] = {
    {"start", py_start, METH_VARARGS, "start(device, capture_stack, thread_id, idle[, most_words]): watch from now on"},
    {"watch_memory", py_watch_memory, METH_NOARGS, "watch_memory(): watch the caching allocators, from now on"},
    {"mark_operators", py_mark_operators, METH_O,
     "mark_operators(log): have the log of _cupti leave out what operators call the driver for"},
    {"stop", py_stop, METH_NOARGS, "stop(): watch no more"},
    {"forget", py_forget, METH_NOARGS, "forget(): log nothing more in this process"},
    {"note", py_note, METH_VARARGS, "note(what, *words): add a NOTE row"},
    {"stream", py_stream, METH_VARARGS, "stream(device): the current stream's handle"},
    {"backward_from", py_backward_from, METH_O, "backward_from(stack): the backward graph is run from there"},
    {"drain", py_drain, METH_NOARGS, "drain(): rows so far, which are then forgotten; again until there are none"},
    {"name", py_name, METH_O, "name(text): its index in names()"},
    {"names", py_names, METH_NOARGS, "names(): of operators, nodes and kernels, by index"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_log", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_torch_log() { return PyModule_Create(&module); }
