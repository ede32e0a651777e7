// What _cupti.c has for other extensions that write to its log: the capsule "cudatool.collect._cupti.log". Nothing here
// takes the interpreter's lock, for which a thread may wait that holds one of the caller's.

#pragma once

#include <stdint.h>

typedef struct {
  uint32_t (*stack_here)(void);  // the number of this thread's Python stack, which the log keeps; 0 for none
  void (*note)(uint16_t what, uint32_t device, uint32_t stack, const uint64_t* words);
  void (*note_text)(uint16_t what, const char* text, const uint64_t* words);
  uint32_t (*module_of)(uint32_t stack);  // the number of the path of the module that is called there, 0 for none
  void (*note_released)(uint32_t device, const uint64_t* words);
  void (*mark_inside)(int change);  // this thread enters (1) or leaves (-1) what another source reports
} Log;
