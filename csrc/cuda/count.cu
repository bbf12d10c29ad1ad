// Counts of given or drawn tasks, without records. A warp takes 128 sequences at a time, four loads before it
// uses the first, and its lane k counts task k: 8 bytes a sequence, for 4 us of 2^20 at the bandwidth of an
// A100.
#include "cuda/counts.cuh"
#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kAtOnce = 4;

// Row b of `counts` from the tasks of a share of the batch.
template <bool kDrawn>
__global__ void __launch_bounds__(kThreads, 8)
    count_kernel(const __grid_constant__ Work work, std::int64_t share) {
  FASTLIN_SHARED_MEMORY(shared);
  int* counts = reinterpret_cast<int*>(shared);  // [kWarps, kMostTasks]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, tasks = static_cast<int>(work.P.K);
  const std::int64_t begin = blockIdx.x * share;
  const std::int64_t end = begin + share < work.P.B ? begin + share : work.P.B;
  int count = 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t first = begin + thread; first - lane < end; first += kAtOnce * kThreads) {
    int task[kAtOnce];
    FASTLIN_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t i = first + u * kThreads;
      task[u] = i >= end ? -1 : kDrawn ? drawn_task(work.source, i) : given_task(work, i);
    }
    FASTLIN_UNROLL
    for (int u = 0; u < kAtOnce; ++u) add_counts(tasks, task[u], count);
  }
  if (lane < tasks) counts[thread / 32 * kMostTasks + lane] = count;
  __syncthreads();
  if (thread >= tasks) return;
  count = 0;
  FASTLIN_UNROLL
  for (int w = 0; w < kWarps; ++w) count += counts[w * kMostTasks + thread];
  work.counts[blockIdx.x * work.P.K + thread] = count;
}

}  // namespace

int launch_count(const Work& work, void* stream) {
  const std::int64_t share = share_of(work.P.B, kThreads);
  const auto kernel = work.P.source != nullptr ? count_kernel<true> : count_kernel<false>;
  return launch(kernel, dim3(static_cast<unsigned>(kCountRows)), dim3(kThreads),
                sizeof(int) * kWarps * kMostTasks, stream, work, share);
}

}  // namespace cuda
}  // namespace fastlin
