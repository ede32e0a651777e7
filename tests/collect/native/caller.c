// A library that makes calls of another one, directly or through a third: which stand on the native stack is the point.
#include <stddef.h>
#include <stdint.h>

typedef void (*Launch)(uint64_t, uint64_t, const void*, size_t);

void call(Launch launch, uint64_t function) {
  launch(function, 3, "arguments", 9);
  __asm__ volatile("");  // not the last call, which would leave no frame
}
void call_through(void (*other)(Launch, uint64_t), Launch launch, uint64_t function) {
  other(launch, function);
  __asm__ volatile("");
}
