// Stands in for libcupti where there is no GPU: all its calls succeed, and `call_driver` is a call of the driver's, which
// ends with `result`.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*Callback)(void*, uint32_t, uint32_t, const void*);
static Callback callback;
static const char* names[] = {NULL, "cuEventRecord", "cuMemAlloc_v2", "cuLaunchKernel", "cuMemFree_v2", "cuModuleLoadData", "cuModuleGetFunction"};
static uint32_t enabled;  // a bit for each call

int cuptiSubscribe(void** subscriber, Callback function, void* data) {
  *subscriber = (void*)1;
  callback = function;
  return 0;
}
int cuptiUnsubscribe(void* subscriber) { return 0; }
int cuptiEnableCallback(uint32_t on, void* subscriber, uint32_t domain, uint32_t number) {
  if (domain == 1 && number < 32) enabled = on ? enabled | 1u << number : enabled & ~(1u << number);
  return 0;
}
int cuptiGetCallbackName(uint32_t domain, uint32_t number, const char** name) {
  if (number >= sizeof names / sizeof *names || !names[number]) return 1;
  *name = names[number];
  return 0;
}
int cuptiGetResultString(int status, const char** text) {
  *text = "an error";
  return 0;
}
int cuptiGetVersion(uint32_t* version) {
  *version = 130001;
  return 0;
}
int cuptiGetDeviceId(void* context, uint32_t* device) {
  *device = 0;
  return 0;
}
int cuptiGetStreamIdEx(void* context, void* stream, uint8_t per_thread, uint32_t* id) {
  *id = 7;
  return 0;
}
typedef void (*Completed)(void*, uint32_t, uint8_t*, size_t, size_t);
typedef void (*Requested)(uint8_t**, size_t*, size_t*);
static Requested requested;
static Completed completed;
static char* record;  // that the next buffer has, and how many there are from it on, each of so many bytes
static size_t records, record_bytes;
static uint8_t* unfinished;  // a buffer of work that still runs
int cuptiActivityRegisterCallbacks(Requested request, Completed function) {
  requested = request;
  completed = function;
  return 0;
}
void* request(void) {
  size_t size, most;
  requested(&unfinished, &size, &most);
  return unfinished;
}
void complete_all(void* first, size_t count, size_t bytes) {
  record = first, records = count, record_bytes = bytes;
  completed(NULL, 0, malloc(8), 8, 8);
}
void complete(void* one) { complete_all(one, 1, 0); }
int cuptiActivityRegisterTimestampCallback(void* function) { return 0; }
int cuptiActivityEnable(uint32_t kind) { return 0; }
int cuptiActivityDisable(uint32_t kind) { return 0; }
int cuptiActivityFlushAll(uint32_t forced) {
  uint8_t* buffer = forced ? unfinished : NULL;
  if (buffer) unfinished = NULL, completed(NULL, 0, buffer, 8, 0);
  return 0;
}
int cuptiActivityGetNextRecord(uint8_t* buffer, size_t size, void** next) {
  if (!records) return 1;
  *next = record;
  record += record_bytes, records--;
  return 0;
}
int cuptiActivityGetNumDroppedRecords(void* context, uint32_t stream, size_t* dropped) {
  *dropped = 0;
  return 0;
}

int result;

static void call_with(uint32_t site, uint32_t correlation, uint32_t number, const void* arguments, const char* symbol) {
  if (!(enabled >> number & 1)) return;
  struct {
    uint32_t site;
    const char* function;
    const void* params;
    void* result;
    const char* symbol;
    void* context;
    uint32_t context_uid;
    uint64_t* data;
    uint32_t correlation;
  } call = {site, names[number], arguments, &result, symbol, (void*)8, 1, NULL, correlation};
  callback(NULL, 1, number, &call);
}

// A call's beginning (site 0) or end (1).
void call_driver_at(uint32_t site, uint32_t correlation, uint32_t number, uint64_t first, uint64_t second) {
  uint64_t arguments[] = {first, second, (uint64_t)"scale"};
  call_with(site, correlation, number, arguments, NULL);
}

static void launch_with(uint64_t function, uint64_t stream, void** arguments, void** extra) {
  struct {
    uint64_t function;
    uint32_t grid[3], block[3], shared;
    uint64_t stream;
    void **arguments, **extra;
  } call = {function, {5, 2, 1}, {64, 1, 1}, 128, stream, arguments, extra};
  call_with(1, 9, 3, &call, "scale");
}

// A launch whose arguments are all in one buffer: it needs no driver that knows their sizes.
void launch(uint64_t function, uint64_t stream, const void* arguments, size_t size) {
  void* extra[] = {(void*)1, (void*)arguments, (void*)2, &size, NULL};
  launch_with(function, stream, NULL, extra);
}

// A launch whose arguments, of 8 bytes each, are given one by one.
void launch_each(uint64_t function, const uint64_t* arguments, size_t count) {
  void* each[100];
  for (size_t i = 0; i < count; i++) each[i] = (void*)&arguments[i];
  launch_with(function, 3, each, NULL);
}

void load_module(void) {  // CUPTI_CBID_RESOURCE_MODULE_LOADED
  void* context = (void*)8;
  callback(NULL, 3, 6, &context);
}

void call_driver(uint32_t number, uint64_t first, uint64_t second) { call_driver_at(1, 1, number, first, second); }
