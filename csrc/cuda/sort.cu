// Sequences in the order of their tasks: a stable counting sort in three launches.
//
// The batch is cut into rows of sequences that follow each other, one for each warp. A warp counts its
// sequences of each task; a scan turns the counts into the places where each row's sequences of a task start;
// then the warps write their sequences there, in order. Nothing is atomic: each row of counts has one warp.
//
// A warp takes 32 sequences at a time and serves their tasks one after another: as many rounds as there are
// different tasks among them. 8 bytes are read for each sequence twice, and 16 are written.
#include "cuda/device.cuh"
#include "cuda/sort.h"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kScanThreads = 256;

// Calls each(sequence, place) for the lanes of one task after another, with a lane's place among them, and
// then end(task, count) once.
template <class Each, class End>
__device__ void for_each_task(std::int64_t task, bool real, Each each, End end) {
  unsigned left = __ballot_sync(0xffffffffu, real);
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t k = __shfl_sync(0xffffffffu, task, leader);
    const unsigned same = __ballot_sync(0xffffffffu, real && task == k);
    const unsigned before = same & ((1u << (threadIdx.x % 32)) - 1);
    if (real && task == k) each(__popc(before));
    end(k, __popc(same));
    left &= ~same;
  }
}

// counts [rows, K]. Blocks are rows, of one warp.
__global__ void count_kernel(const std::int64_t* task, std::int64_t B, std::int64_t K, int* counts) {
  const std::int64_t each = (B + gridDim.x - 1) / gridDim.x;
  const std::int64_t begin = blockIdx.x * each, end = begin + each < B ? begin + each : B;
  const int lane = static_cast<int>(threadIdx.x);
  int* row = counts + blockIdx.x * K;
  FASTLIN_NO_UNROLL
  for (std::int64_t k = lane; k < K; k += 32) row[k] = 0;
  __syncwarp();
  FASTLIN_NO_UNROLL
  for (std::int64_t first = begin; first < end; first += 32) {
    const bool real = first + lane < end;
    for_each_task(
        real ? task[first + lane] : 0, real, [](int) {},
        [=](std::int64_t k, int count) {
          if (lane == 0) row[k] += count;
        });
  }
}

// Turns counts [rows, K] into the positions of the first sequences of each row and task, and writes those of
// the tasks to start [K + 1]. One block.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(int* counts, std::int64_t rows, std::int64_t K, std::int64_t* start) {
  FASTLIN_SHARED_MEMORY(shared);
  std::int64_t* sums = reinterpret_cast<std::int64_t*>(shared);  // [threads]
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t entries = rows * K, each = (entries + kScanThreads - 1) / kScanThreads;
  const std::int64_t begin = thread * each, end = begin + each < entries ? begin + each : entries;
  const auto at = [=](std::int64_t entry) -> int& { return counts[entry % rows * K + entry / rows]; };
  std::int64_t sum = 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t entry = begin; entry < end; ++entry) sum += at(entry);
  sums[thread] = sum;
  __syncthreads();
  FASTLIN_NO_UNROLL
  for (int step = 1; step < kScanThreads; step *= 2) {
    const std::int64_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  std::int64_t position = sums[thread] - sum;
  FASTLIN_NO_UNROLL
  for (std::int64_t entry = begin; entry < end; ++entry) {
    if (entry % rows == 0) start[entry / rows] = position;
    const int count = at(entry);
    at(entry) = static_cast<int>(position);
    position += count;
  }
  if (thread == kScanThreads - 1) start[K] = sums[thread];
}

// Blocks are rows, of one warp, as in count_kernel.
__global__ void scatter_kernel(const std::int64_t* task, std::int64_t B, std::int64_t K, int* positions,
                               std::int64_t* sequence, std::int64_t* sorted) {
  const std::int64_t each = (B + gridDim.x - 1) / gridDim.x;
  const std::int64_t begin = blockIdx.x * each, end = begin + each < B ? begin + each : B;
  const int lane = static_cast<int>(threadIdx.x);
  int* row = positions + blockIdx.x * K;
  FASTLIN_NO_UNROLL
  for (std::int64_t first = begin; first < end; first += 32) {
    const std::int64_t i = first + lane;
    const bool real = i < end;
    const std::int64_t k = real ? task[i] : 0;
    for_each_task(
        k, real,
        [=](int place) {
          const std::int64_t to = row[k] + place;
          sequence[to] = i;
          sorted[to] = k;
        },
        [=](std::int64_t done, int count) {
          __syncwarp();
          if (lane == 0) row[done] += count;
          __syncwarp();
        });
  }
}

}  // namespace

std::int64_t sort_rows(std::int64_t B, std::int64_t K) {
  return std::max<std::int64_t>(std::min({(B + 31) / 32, kMostRows, kMostCounts / K}), 1);
}

int launch_counts(const std::int64_t* task, std::int64_t B, std::int64_t K, std::int64_t rows, int* counts,
                  void* stream) {
  return launch(count_kernel, dim3(static_cast<unsigned>(rows)), dim3(32), 0, stream, task, B, K, counts);
}

int launch_sort(const std::int64_t* task, std::int64_t B, std::int64_t K, int* counts, std::int64_t* sequence,
                std::int64_t* sorted, std::int64_t* start, void* stream) {
  const std::int64_t rows = sort_rows(B, K);
  const dim3 grid(static_cast<unsigned>(rows));
  int error = launch_counts(task, B, K, rows, counts, stream);
  if (error == 0) {
    error = launch(scan_kernel, dim3(1), dim3(kScanThreads), kScanThreads * sizeof(std::int64_t), stream,
                   counts, rows, K, start);
  }
  if (error == 0) {
    error = launch(scatter_kernel, grid, dim3(32), 0, stream, task, B, K, counts, sequence, sorted);
  }
  return error;
}

}  // namespace cuda
}  // namespace fastlin
