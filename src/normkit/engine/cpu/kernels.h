// How a loop of kernels.cpp is called: by name, with addresses, their types, and numbers.
#pragma once
#include <cstdint>

namespace normkit {

enum Type : int8_t { NONE = -1, FLOAT = 0, DOUBLE = 1, BFLOAT16 = 2, INT64 = 3 };

struct Call {
  void* const* at;        // of its tensors, dense; null for None
  const int8_t* type;     // of each
  const double* number;
  int threads;            // that it may take
};

// Gives 1 where a batch was left out of the running statistics, for it was not finite; else 0.
using Kernel = int (*)(const Call&);

Kernel kernel(const char* name);  // null if there is none

}  // namespace normkit
