// Counts of given or drawn tasks, without records. A warp takes 128 sequences at a time, four loads before it
// uses the first, and its lane k counts task k: 8 bytes a sequence, for 4 us of 2^20 at the bandwidth of an
// A100.
#include "cuda/counts.cuh"
#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

// A drawn task waits for more: for its step, its ten rounds of Philox, and the search. 512 blocks of eight
// warps are 31 warps a multiprocessor of an H100.
template <bool kDrawn>
constexpr int kWarps = kDrawn ? 8 : 4;
constexpr int kAtOnce = 4;

// Row b of `counts` from the tasks of a share of the batch.
template <bool kDrawn>
__global__ void __launch_bounds__(32 * kWarps<kDrawn>, 32 / kWarps<kDrawn>)
    count_kernel(const __grid_constant__ Work work, std::int64_t share) {
  constexpr int kThreads = 32 * kWarps<kDrawn>;
  FASTLIN_SHARED_MEMORY(shared);
  int* counts = reinterpret_cast<int*>(shared);  // [warps, kMostTasks]
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
  for (int w = 0; w < kWarps<kDrawn>; ++w) count += counts[w * kMostTasks + thread];
  work.counts[blockIdx.x * work.P.K + thread] = count;
}

template <bool kDrawn>
int launch_counts(const Work& work, void* stream) {
  constexpr int kThreads = 32 * kWarps<kDrawn>;
  return launch(count_kernel<kDrawn>, dim3(static_cast<unsigned>(kCountRows)), dim3(kThreads),
                sizeof(int) * kWarps<kDrawn> * kMostTasks, stream, work, share_of(work.P.B, kThreads));
}

}  // namespace

int launch_count(const Work& work, void* stream) {
  return work.P.source != nullptr ? launch_counts<true>(work, stream) : launch_counts<false>(work, stream);
}

}  // namespace cuda
}  // namespace fastlin
