// The kernels over vectors of 64 and of 16 bytes in standard C++: AVX-512's and NEON's lane counts on any
// machine. Linked into the test driver only.
#define FASTLIN_VEC "testing/vec_portable.h"
#include "cpu/kernels_before.h"

#define FASTLIN_PORTABLE_BYTES 64
namespace fastlin {
namespace portable64 {
namespace {
#include "cpu/kernels_once.h"
}  // namespace
extern const InstructionSet instruction_set;
const InstructionSet instruction_set{"portable64", [] { return true; }, kernels<float>(), kernels<double>()};
}  // namespace portable64
}  // namespace fastlin

#undef FASTLIN_PORTABLE_BYTES
#define FASTLIN_PORTABLE_BYTES 16
namespace fastlin {
namespace portable16 {
namespace {
#include "cpu/kernels_once.h"
}  // namespace
extern const InstructionSet instruction_set;
const InstructionSet instruction_set{"portable16", [] { return true; }, kernels<float>(), kernels<double>()};
}  // namespace portable16
}  // namespace fastlin
