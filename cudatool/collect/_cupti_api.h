// What this package uses of CUPTI: structures and functions, as its headers document them (cupti_callbacks.h,
// cupti_activity.h). They are declared here, so that it builds without CUPTI, which is loaded at run time.

#pragma once

enum { DOMAIN_DRIVER_API = 1, DOMAIN_RESOURCE = 3, API_ENTER = 0, API_EXIT = 1, MODULE_LOADED = 6 };
enum { KIND_MEMCPY = 1, KIND_MEMSET = 2, KIND_KERNEL = 10, KIND_GRAPH = 51 };

typedef struct {
  uint32_t site;
  const char* function;
  const void* params;
  void* result;
  const char* symbol;
  void* context;
  uint32_t context_uid;
  uint64_t* correlation_data;
  uint32_t correlation;
} CallbackData;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, config;
  uint32_t partitioned[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], static_shared, dynamic_shared;
  uint32_t local_per_thread, local_total, correlation;
  int64_t grid_id;
  const char* name;
  void* reserved;
  uint64_t queued, submitted;
  uint8_t launch[8];
  uint64_t graph_node;
  uint32_t shared_limit, graph;
} KernelRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind;
  uint8_t copy_kind, source, destination, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
} CopyRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, value;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
} FillRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, correlation;
  uint64_t start, end;
  uint32_t device, graph, context, stream;
} GraphRecord;

typedef void (*Callback)(void*, uint32_t, uint32_t, const CallbackData*);
typedef void (*BufferRequested)(uint8_t**, size_t*, size_t*);
typedef void (*BufferCompleted)(void*, uint32_t, uint8_t*, size_t, size_t);

static struct {
  void* handle;
  int (*Subscribe)(void**, Callback, void*);
  int (*Unsubscribe)(void*);
  int (*EnableCallback)(uint32_t, void*, uint32_t, uint32_t);
  int (*GetCallbackName)(uint32_t, uint32_t, const char**);
  int (*GetResultString)(int, const char**);
  int (*GetVersion)(uint32_t*);
  int (*GetDeviceId)(void*, uint32_t*);
  int (*GetStreamIdEx)(void*, void*, uint8_t, uint32_t*);
  int (*ActivityRegisterCallbacks)(BufferRequested, BufferCompleted);
  int (*ActivityRegisterTimestampCallback)(uint64_t (*)(void));
  int (*ActivityEnable)(uint32_t);
  int (*ActivityDisable)(uint32_t);
  int (*ActivityFlushAll)(uint32_t);
  int (*ActivityGetNextRecord)(uint8_t*, size_t, void**);
  int (*ActivityGetNumDroppedRecords)(void*, uint32_t, size_t*);
} cupti;
