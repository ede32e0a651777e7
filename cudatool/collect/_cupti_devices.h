// Devices: which one a context is of, and how much of its memory the driver charges to this process.

#pragma once

static void* contexts[64];
static uint32_t context_devices[64];
static int context_count;

// The device of a context. The lock must not be held: CUPTI returns buffers while it holds a lock of its own.
static uint32_t device_of(void* context) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < context_count; i++) {
    if (contexts[i] == context) {
      pthread_mutex_unlock(&lock);
      return context_devices[i];
    }
  }
  pthread_mutex_unlock(&lock);
  uint32_t device = 0, stream = 0;
  if (!context || cupti.GetDeviceId(context, &device)) return 0;
  cupti.GetStreamIdEx(context, NULL, 0, &stream);
  pthread_mutex_lock(&lock);
  if (context_count < (int)(sizeof contexts / sizeof *contexts)) {
    contexts[context_count] = context;
    context_devices[context_count++] = device;
  }
  Row* row = new_row();
  if (row) {
    row->what = CONTEXT;
    row->time = now();
    row->device = device;
    row->words[0] = stream;
  }
  pthread_mutex_unlock(&lock);
  return device;
}

// ---- use of device memory ----

typedef struct {
  uint32_t process;
  uint64_t used;
  uint32_t instances[2];
} ProcessUse;  // nvmlProcessInfo_t
typedef struct {
  uint64_t total, free, used;
} DeviceUse;  // nvmlMemory_t

enum { MOST_DEVICES = 16, MOST_PROCESSES = 256, SAMPLE_PAUSE = 2000000 };

static struct {
  int (*Init_v2)(void);
  int (*DeviceGetHandleByPciBusId_v2)(const char*, void**);
  int (*DeviceGetComputeRunningProcesses_v3)(void*, unsigned*, ProcessUse*);
  int (*DeviceGetMemoryInfo)(void*, DeviceUse*);
  int (*bus_of)(char*, int, int);  // cuDeviceGetPCIBusId
  int is_open;  // 1, or -1 if it cannot be initialized
} nvml;
static struct {
  void* handle;
  uint32_t causes;  // since the last sample
  uint64_t sampled;  // when
  uint64_t process, used;  // what was found then
  uint32_t local;    // bytes for each thread, at most, of kernels so far
} sampled_devices[MOST_DEVICES];

static void open_nvml(void) {
  nvml.is_open = -1;
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library || !driver) return;
  *(void**)&nvml.Init_v2 = dlsym(library, "nvmlInit_v2");
  *(void**)&nvml.DeviceGetHandleByPciBusId_v2 = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
  *(void**)&nvml.DeviceGetComputeRunningProcesses_v3 = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
  *(void**)&nvml.DeviceGetMemoryInfo = dlsym(library, "nvmlDeviceGetMemoryInfo");
  *(void**)&nvml.bus_of = dlsym(driver, "cuDeviceGetPCIBusId");
  if (nvml.Init_v2 && nvml.DeviceGetHandleByPciBusId_v2 && nvml.DeviceGetComputeRunningProcesses_v3 &&
      nvml.DeviceGetMemoryInfo && nvml.bus_of && !nvml.Init_v2()) nvml.is_open = 1;
}

static int captures;  // of streams, in progress

// Notes what the driver charges to this process on a device. The lock must not be held: NVML is slow and takes locks.
// The driver itself is never queried, and nothing is while a stream is captured: some queries break another thread's
// capture.
static void sample(uint32_t device) {
  char bus[32];
  DeviceUse memory;
  static __thread ProcessUse processes[MOST_PROCESSES];
  unsigned count = MOST_PROCESSES;
  if (device >= MOST_DEVICES || __atomic_load_n(&captures, __ATOMIC_RELAXED) > 0) return;
  if (!nvml.is_open) open_nvml();
  if (nvml.is_open < 0) return;
  void* handle = sampled_devices[device].handle;
  if (!handle && (nvml.bus_of(bus, sizeof bus, (int)device) || nvml.DeviceGetHandleByPciBusId_v2(bus, &handle))) return;
  sampled_devices[device].handle = handle;
  uint32_t causes = __atomic_exchange_n(&sampled_devices[device].causes, 0, __ATOMIC_RELAXED);
  if (nvml.DeviceGetMemoryInfo(handle, &memory)) return;
  uint64_t own = 0;
  if (nvml.DeviceGetComputeRunningProcesses_v3(handle, &count, processes)) count = 0;
  for (unsigned i = 0; i < count; i++) {
    if (processes[i].process == (uint32_t)owner && processes[i].used != UINT64_MAX) own = processes[i].used;
  }
  pthread_mutex_lock(&lock);
  sampled_devices[device].sampled = now();
  int is_known = !causes && sampled_devices[device].process == own && sampled_devices[device].used == memory.used;
  sampled_devices[device].process = own;
  sampled_devices[device].used = memory.used;
  Row* row = is_known ? NULL : new_row();
  if (row) {
    row->time = sampled_devices[device].sampled;
    row->what = USE;
    rows_so_far--;
    row->device = device;
    row->thread = this_thread();
    row->words[0] = own;
    row->words[1] = memory.used;
    row->words[2] = memory.total;
    row->words[3] = causes;
  }
  pthread_mutex_unlock(&lock);
}

static void took(uint32_t device, uint32_t cause) {
  if (device < MOST_DEVICES) __atomic_fetch_or(&sampled_devices[device].causes, cause, __ATOMIC_RELAXED);
}
