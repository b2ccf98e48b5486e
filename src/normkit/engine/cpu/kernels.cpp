// The loops by name.

#include "kernels.h"

#include <cstring>

#define LOOPS(EACH)                                                               \
  EACH(moments) EACH(map) EACH(sums) EACH(input_gradient)                         \
  EACH(pool_map) EACH(pool_gradient) EACH(fixed_map) EACH(fixed_gradient)         \
  EACH(gate_map) EACH(gate_gradient) EACH(score)                                  \
  EACH(channel_map) EACH(channel_gradient) EACH(mix_map) EACH(mix_gradient)       \
  EACH(tape_map) EACH(tape_gradient) EACH(squash_map) EACH(squash_gradient)       \
  EACH(pixel_affine) EACH(pixel_map) EACH(pixel_gradient)                         \
  EACH(depthwise_map) EACH(depthwise_sums) EACH(depthwise_input_gradient)

namespace normkit {

#define DECLARED(name) int name##_kernel(const Call&);
LOOPS(DECLARED)

Kernel kernel(const char* name) {
#define FOUND(each) if (!std::strcmp(name, #each)) return each##_kernel;
  LOOPS(FOUND)
  return nullptr;
}

}  // namespace normkit
