// The end of a call: partial sums of chunks -> gradients, per-task losses, loss.
//
//   reduce_kernel   a number is the sum of its chunks. Lanes are 32 numbers next to each other, whole lines
//                   of every chunk; the 8 warps of a block take every eighth chunk, in order and in double,
//                   and their sums are added as a tree: ((0+1)+(2+3))+((4+5)+(6+7)). 512 chunks are 64 loads
//                   a warp, none of which waits for another one's sum.
//   finish_kernel   a block is a trial, its warps share out the tasks: finish_trial (core/records.h) adds the
//                   prompt's part and writes the results of a task; then the block adds up the loss.
//
// Both are bound by latency: 8200 numbers of 50 trials at m = 11 are 257 blocks and 33 KB a chunk.
#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kReduceWarps = 8, kFinishWarps = 4;

// Where number i of a chunk goes: gradients as they are wanted, sums of tasks to `sums` [K, R, width].
__device__ void put_number(const Work& work, std::int64_t i, double sum, double* sums) {
  const Numbers& at = work.numbers;
  if (i < at.dA) {
    work.out.dW[i] = static_cast<float>(work.P.scale * sum);
  } else if (i < at.dC) {
    work.out.dA[i - at.dA] = static_cast<float>(sum);
  } else if (i < at.sums) {
    work.out.dC[i - at.dC] = static_cast<float>(sum);
  } else {
    const std::int64_t column = (i - at.sums) % work.at.width;
    const bool is_e = work.at.e >= 0 && column >= work.at.e && column < work.at.e + work.P.m;
    sums[i - at.sums] = is_e ? work.P.scale * sum : sum;
  }
}

// Blocks of 32 numbers. Threads (32, 8).
__global__ void __launch_bounds__(32 * kReduceWarps)
    reduce_kernel(const __grid_constant__ Work work, double* sums) {
  FASTLIN_SHARED_MEMORY(shared);
  double* of_warps = reinterpret_cast<double*>(shared);  // [8, 32]
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  const bool is_number = i < work.numbers.count;
  double sum = 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t chunk = warp; is_number && chunk < work.chunks; chunk += 4 * kReduceWarps) {
    float next[4];  // four loads under way
    FASTLIN_UNROLL
    for (int u = 0; u < 4; ++u) {
      const std::int64_t c = chunk + u * kReduceWarps;
      next[u] = c < work.chunks ? work.partial[c * work.numbers.count + i] : 0.0f;
    }
    FASTLIN_UNROLL
    for (int u = 0; u < 4; ++u) sum += static_cast<double>(next[u]);
  }
  of_warps[warp * 32 + lane] = sum;
  __syncthreads();
  FASTLIN_UNROLL
  for (int step = 1; step < kReduceWarps; step *= 2) {
    if (warp % (2 * step) == 0) of_warps[warp * 32 + lane] += of_warps[(warp + step) * 32 + lane];
    __syncthreads();
  }
  if (warp == 0 && is_number) put_number(work, i, of_warps[lane], sums);
}

// The warp that calls.
struct Warp {
  std::int64_t first = static_cast<std::int64_t>(threadIdx.x);
  static constexpr std::int64_t step = 32;
  __device__ void sync() const { __syncwarp(); }
};

// Blocks are trials. Threads (32, 4); shared memory: counts [K], scratch [4, m].
__global__ void __launch_bounds__(32 * kFinishWarps, 1)
    finish_kernel(const __grid_constant__ Work work, double* sums) {
  FASTLIN_SHARED_MEMORY(shared);
  double* counts = reinterpret_cast<double*>(shared);
  const int warp = static_cast<int>(threadIdx.y);
  double* scratch = counts + work.P.K + warp * work.P.m;
  const std::int64_t r = blockIdx.x;
  FASTLIN_NO_UNROLL
  for (int k = warp; k < work.P.K; k += kFinishWarps) {
    const double count = count_of(work, k);
    if (threadIdx.x == 0) counts[k] = count;
    double* record = sums + (k * work.P.R + r) * work.at.width;
    finish_trial(work.P, work.out, work.at, k, r, count, record, scratch, Warp{});
  }
  __syncthreads();
  if (work.out.loss == nullptr || warp != 0 || threadIdx.x != 0) return;
  const auto of_task = [counts](std::int64_t k) { return counts[k]; };
  work.out.loss[r] = weighted_loss(work.P, work.out.per_task + r * work.P.K, of_task, work.total());
}

}  // namespace

int launch_finish(const Work& work, double* sums, void* stream) {
  int error = 0;
  if (work.numbers.count > 0) {
    const auto grid = static_cast<unsigned>((work.numbers.count + 31) / 32);
    error = launch(reduce_kernel, dim3(grid), dim3(32, kReduceWarps), 32 * kReduceWarps * sizeof(double),
                   stream, work, sums);
  }
  if (error == 0 && (work.at.width > 0 || work.out.per_task != nullptr)) {
    const auto shared = static_cast<std::size_t>(work.P.K + kFinishWarps * work.P.m) * sizeof(double);
    error = launch(finish_kernel, dim3(static_cast<unsigned>(work.P.R)), dim3(32, kFinishWarps), shared,
                   stream, work, sums);
  }
  return error;
}

}  // namespace cuda
}  // namespace fastlin
