// The kernels in standard C++, for every machine.
#define FASTLIN_VEC "cpu/vec/scalar.h"
#include "cpu/kernels_before.h"

namespace fastlin {
namespace scalar {
namespace {
#include "cpu/kernels_once.h"
}  // namespace
extern const InstructionSet instruction_set;
const InstructionSet instruction_set{"scalar", [] { return true; }, kernels<float>(), kernels<double>()};
}  // namespace scalar
}  // namespace fastlin
