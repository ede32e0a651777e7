// Launches with their arguments, and the images that their code was loaded from.

#pragma once

// ---- images of code ----

enum { IMAGE_TEXT = 1, IMAGE_ELF = 2, IMAGE_FATBIN = 3 };
#define ELF_MAGIC 0x464C457Fu
#define FATBIN_MAGIC 0xBA55ED50u
#define FATBIN_WRAPPER_MAGIC 0x466243B1u

static uint64_t number_at(const char* at, size_t size) {
  uint64_t value = 0;
  memcpy(&value, at, size);
  return value;
}

// The bytes of an ELF file: up to the end of its last section, segment or table.
static size_t elf_size(const char* image) {
  uint64_t sections = number_at(image + 0x28, 8), segments = number_at(image + 0x20, 8);
  uint64_t section_size = number_at(image + 0x3A, 2), section_count = number_at(image + 0x3C, 2);
  uint64_t end = sections + section_size * section_count;
  uint64_t of_segments = segments + number_at(image + 0x36, 2) * number_at(image + 0x38, 2);
  if (of_segments > end) end = of_segments;
  for (uint64_t i = 0; i < section_count; i++) {
    const char* section = image + sections + i * section_size;
    int has_bytes = number_at(section + 4, 4) != 8;  // SHT_NOBITS
    uint64_t stop = number_at(section + 0x18, 8) + number_at(section + 0x20, 8);
    if (has_bytes && stop > end) end = stop;
  }
  return (size_t)end;
}

// What an image is, where it begins and how long it is; the call that loads it has accepted it.
static int image_at(const char** image, size_t* length) {
  uint32_t magic = (uint32_t)number_at(*image, 4);
  if (magic == FATBIN_WRAPPER_MAGIC) {
    *image = (const char*)(uintptr_t)number_at(*image + 8, 8);
    magic = (uint32_t)number_at(*image, 4);
  }
  if (magic == FATBIN_MAGIC) {
    *length = (size_t)(number_at(*image + 6, 2) + number_at(*image + 8, 8));
    return IMAGE_FATBIN;
  }
  if (magic == ELF_MAGIC) {
    *length = elf_size(*image);
    return IMAGE_ELF;
  }
  *length = strlen(*image);
  return IMAGE_TEXT;
}

// Words: what it is, and its length; a digest; the offset of a copy, unless it is machine code alone. The lock is held.
static void note_image(const char* image, uint64_t* words) {
  size_t length = 0;
  int kind = image_at(&image, &length);
  words[0] = (uint64_t)kind | (uint64_t)length << 8;
  words[1] = length <= MOST_IMAGE ? hashed(image, length) : 0;
  words[2] = kind != IMAGE_ELF && length <= MOST_IMAGE ? put_blob(image, length) : UINT64_MAX;
}

// ---- launches ----

// Of other libraries: not, with their arguments, or with as many stacks as MOST_STACKS allows.
enum { NO_LAUNCHES, WITH_ARGUMENTS, WITH_STACKS };
static int notes_launches;
enum { STACKS_PERIOD = 100000000, MOST_STACKS = 500 };  // in so many ns at most so many stacks of launches
static uint64_t stacks_since;
static uint32_t stacks_taken;
enum { MOST_ARGUMENTS = 1 << 15 };  // bytes: the most that a kernel can have (CUDA 12.1 and later)
enum { INVALID_VALUE = 1, INVALID_HANDLE = 400 };  // CUresult
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_PROGRAMMATIC = 6 };  // CUlaunchAttributeID

typedef struct {
  uint32_t grid[3], block[3], shared;
  void* stream;
} Geometry;  // as in the parameters of cuLaunchKernel, and as CUlaunchConfig begins

typedef struct {
  int32_t id;
  char pad[4];
  union { int32_t number; char all[64]; } value;
} LaunchAttribute;

typedef struct {
  Geometry geometry;
  const LaunchAttribute* attributes;
  uint32_t attribute_count;
} LaunchConfig;

typedef struct {
  void* function;
  Geometry geometry;
  void **arguments, **extra;  // the latter is not there in cuLaunchCooperativeKernel
} KernelLaunch;

typedef struct {
  const LaunchConfig* config;
  void* function;
  void **arguments, **extra;
} ConfiguredLaunch;

static struct {
  int (*of_function)(void*, size_t, size_t*, size_t*);  // cuFuncGetParamInfo
  int (*of_kernel)(void*, size_t, size_t*, size_t*);    // cuKernelGetParamInfo
} layout;
static int (*is_capturing)(void*, uint32_t*);  // cuStreamIsCapturing

typedef struct { uint16_t offset, size; } Parameter;
enum { MOST_PARAMETERS = 1 << 12, KEPT_PARAMETERS = 30, KEPT_KERNELS = 1 << 11 };
static uint32_t loads;  // of code, so far
static void code_was_loaded(void) { __atomic_fetch_add(&loads, 1, __ATOMIC_RELEASE); }

// The parameters of kernels that were launched, by their handles, as asking for them takes longer than the launch. A handle
// stands for another kernel only after more code was loaded: then the driver is asked again.
static struct {
  void* function;
  uint32_t loads;
  int count;
  Parameter parameters[KEPT_PARAMETERS];
} kept_kernels[KEPT_KERNELS];

// The parameters of a kernel: how many, or -1 if they cannot be known. The lock must not be held: it asks the driver.
static int parameters_of(void* function, Parameter* out) {
  uint32_t loaded = __atomic_load_n(&loads, __ATOMIC_ACQUIRE);
  size_t at = (uintptr_t)function * 0x9E3779B97F4A7C15u >> 53;
  pthread_mutex_lock(&lock);
  int count = kept_kernels[at].function == function && kept_kernels[at].loads == loaded ? kept_kernels[at].count : -1;
  if (count > 0) memcpy(out, kept_kernels[at].parameters, (size_t)count * sizeof *out);
  pthread_mutex_unlock(&lock);
  if (count >= 0) return count;
  size_t offset, size;
  if (!layout.of_function || !layout.of_kernel) return -1;
  int (*of)(void*, size_t, size_t*, size_t*) = layout.of_function;
  int status = of(function, 0, &offset, &size);
  if (status == INVALID_HANDLE) status = (of = layout.of_kernel)(function, 0, &offset, &size);
  for (count = 0; !status; status = of(function, (size_t)++count, &offset, &size)) {
    if (count == MOST_PARAMETERS || offset + size > MOST_ARGUMENTS) return -1;
    out[count] = (Parameter){(uint16_t)offset, (uint16_t)size};
  }
  if (status != INVALID_VALUE) return -1;  // else there is no such parameter: these were all
  if (count <= KEPT_PARAMETERS) {
    pthread_mutex_lock(&lock);
    kept_kernels[at].function = function;
    kept_kernels[at].loads = loaded;
    kept_kernels[at].count = count;
    if (count) memcpy(kept_kernels[at].parameters, out, (size_t)count * sizeof *out);
    pthread_mutex_unlock(&lock);
  }
  return count;
}

// Packs a launch's arguments; the bytes, or -1 if they cannot be known. The lock must not be held.
static int pack_arguments(const KernelLaunch* launch, char* out) {
  static __thread Parameter parameters[MOST_PARAMETERS];
  void* const* extra = launch->arguments ? NULL : launch->extra;
  if (extra) {  // a buffer with all of them: pairs of a key and a value, up to key 0 (CU_LAUNCH_PARAM_END)
    const void* buffer = NULL;
    size_t size = 0;
    for (; *extra; extra += 2) {
      if (*extra == (void*)1) buffer = extra[1];
      if (*extra == (void*)2) size = *(const size_t*)extra[1];
    }
    if (!buffer || size > MOST_ARGUMENTS) return -1;
    memcpy(out, buffer, size);
    return (int)size;
  }
  size_t end = 0;
  int count = parameters_of(launch->function, parameters);
  for (int i = 0; i < count; i++) {
    size_t offset = parameters[i].offset, size = parameters[i].size;
    if (!launch->arguments || !launch->arguments[i]) return -1;
    if (offset > end) memset(out + end, 0, offset - end);
    memcpy(out + offset, launch->arguments[i], size);
    end = offset + size;
  }
  return count < 0 ? -1 : (int)end;
}

static void note_launch(const CallbackData* data) {
  static __thread char arguments[MOST_ARGUMENTS];
  KernelLaunch launch = {0};
  uint64_t flags = 0;
  if (!strncmp(data->function, "cuLaunchKernelEx", 16)) {
    const ConfiguredLaunch* given = data->params;
    launch = (KernelLaunch){given->function, given->config->geometry, given->arguments, given->extra};
    for (uint32_t i = 0; i < given->config->attribute_count; i++) {
      const LaunchAttribute* one = &given->config->attributes[i];
      if (one->id == ATTRIBUTE_COOPERATIVE && one->value.number) flags |= COOPERATIVE;
      if (one->id == ATTRIBUTE_PROGRAMMATIC && one->value.number) flags |= PROGRAMMATIC;
    }
  } else {
    int is_cooperative = !strncmp(data->function, "cuLaunchCooperativeKernel", 25);
    memcpy(&launch, data->params, is_cooperative ? offsetof(KernelLaunch, extra) : sizeof launch);
    flags = is_cooperative ? COOPERATIVE : 0;
  }
  if (strstr(data->function, "_ptsz")) flags |= PER_THREAD;
  int length = notes_launches == WITH_ARGUMENTS ? pack_arguments(&launch, arguments) : -1;
  if (length < 0) flags |= ARGUMENTS_UNKNOWN;
  uint32_t capture = 0;
  if (__atomic_load_n(&captures, __ATOMIC_RELAXED) > 0 && is_capturing) is_capturing(launch.geometry.stream, &capture);
  if (capture) flags |= CAPTURED;
  uint32_t device = device_of(data->context);
  const char* name = data->symbol ? data->symbol : "";
  pthread_mutex_lock(&lock);
  uint64_t time = now();
  if (time - stacks_since > STACKS_PERIOD) stacks_since = time, stacks_taken = 0;
  int has_stack = notes_launches == WITH_ARGUMENTS || stacks_taken++ < MOST_STACKS;
  pthread_mutex_unlock(&lock);
  uint32_t stack = has_stack ? this_stack(NULL) : 0;
  pthread_mutex_lock(&lock);
  Row* row = new_row();
  if (row) {
    row->time = now();
    row->what = LAUNCH;
    row->thread = this_thread();
    row->correlation = data->correlation;
    row->stack = stack;
    row->device = device;
    row->context = data->context_uid;
    row->words[0] = (uintptr_t)launch.function;
    row->words[1] = (uintptr_t)launch.geometry.stream;
    row->words[2] = packed((const int32_t*)launch.geometry.grid);
    row->words[3] = packed((const int32_t*)launch.geometry.block);
    row->words[5] = length < 0 ? UINT64_MAX : put_blob(arguments, (size_t)length);
    if (row->words[5] == UINT64_MAX) flags |= ARGUMENTS_UNKNOWN, length = 0;
    row->words[4] = launch.geometry.shared | flags << 32;
    row->words[6] = (uint64_t)length;
    row->words[7] = intern(&names, name, strlen(name));
  }
  pthread_mutex_unlock(&lock);
}
