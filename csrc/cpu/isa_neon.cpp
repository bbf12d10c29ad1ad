// The kernels for NEON, which every AArch64 machine has.
#define FASTLIN_VEC "cpu/vec/neon.h"
#include "cpu/kernels_before.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace fastlin {
namespace neon {
namespace {
#include "cpu/kernels_once.h"
}  // namespace
extern const InstructionSet instruction_set;
const InstructionSet instruction_set{"neon", [] { return true; }, kernels<float>(), kernels<double>()};
}  // namespace neon
}  // namespace fastlin
#endif
