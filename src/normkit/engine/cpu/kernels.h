// How a loop for a CPU is called: by name, with addresses, their types, and numbers.
//
// moments, map, sums and input_gradient are the four passes over activations, the last three also
// with a depthwise convolution in them (depthwise, by the bands of window); pool, fixed, gate,
// channel and mix the coefficients of each family, and condensation a part of gate's; tape those of
// layers in no family; pixel and squash are both in one. What they share: values (types of
// activations), tables (arguments), lanes and columns (sums along memory, and across it), maps,
// pooling, memory (running statistics), threads.
//
// Activations are float, double or bfloat16, (rows, C, L) or, with channels last, (rows, L, C): L
// positions of one cell. Tables are double, so that a step's small arithmetic adds no error of its
// own; what is added up over positions is added in lanes of the activations' width, some thousands
// of values at a time, and these parts in double. A center far from zero does not fit into a float:
// what is left of it goes into the shift.
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
