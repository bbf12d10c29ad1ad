// Sequences of each task, for calls whose kernels need the counts before they add anything up.
//
// A block is one warp and a row of `counts`: an equal part of the batch. Its lanes count their sequences of
// each of the 8 tasks in registers, and add them up. Nothing is atomic.
#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

__global__ void count_tasks_kernel(const __grid_constant__ Work work) {
  const std::int64_t B = work.P.B, each = (B + gridDim.x - 1) / gridDim.x;
  const std::int64_t begin = blockIdx.x * each, end = begin + each < B ? begin + each : B;
  const bool draws = work.P.source != nullptr;
  int counts[kMostTasks] = {};
  FASTLIN_NO_UNROLL
  for (std::int64_t i = begin + static_cast<int>(threadIdx.x); i < end; i += 32) {
    const int task = draws ? drawn_task(work.source, i) : given_task(work, i);
    FASTLIN_UNROLL
    for (int k = 0; k < kMostTasks; ++k) counts[k] += task == k ? 1 : 0;
  }
  FASTLIN_UNROLL
  for (int k = 0; k < kMostTasks; ++k) {
    for (int bits = 16; bits > 0; bits /= 2) counts[k] += __shfl_xor_sync(0xffffffffu, counts[k], bits);
    if (threadIdx.x == 0 && k < work.P.K) work.counts[blockIdx.x * work.P.K + k] = counts[k];
  }
}

}  // namespace

int launch_count(const Work& work, void* stream) {
  return launch(count_tasks_kernel, dim3(static_cast<unsigned>(kCountRows)), dim3(32), 0, stream, work);
}

}  // namespace cuda
}  // namespace fastlin
