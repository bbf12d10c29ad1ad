// The kernels for AVX2 with FMA.
#define FASTLIN_VEC "cpu/vec/avx2.h"
#include "cpu/kernels_before.h"

#if defined(__x86_64__)
#include <immintrin.h>

FASTLIN_BEGIN_TARGET("avx2,fma")
namespace fastlin {
namespace avx2 {
namespace {
#include "cpu/kernels_once.h"
}  // namespace
}  // namespace avx2
}  // namespace fastlin
FASTLIN_END_TARGET

namespace fastlin {
namespace avx2 {
extern const InstructionSet instruction_set;
const InstructionSet instruction_set{
    "avx2",
    [] { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; },
    {Vec<float>::size, &attention<float>, &gram<float>, &sample<float>, &sample_tasks<float>,
     &fma_chains<float>, &fill_uniform<float>, &fill_normal<float>, &fill_chi<float>,
     &box_muller_pairs<float>},
    {Vec<double>::size, &attention<double>, &gram<double>, &sample<double>, &sample_tasks<double>,
     &fma_chains<double>, &fill_uniform<double>, &fill_normal<double>, &fill_chi<double>,
     &box_muller_pairs<double>}};
}  // namespace avx2
}  // namespace fastlin
#endif
