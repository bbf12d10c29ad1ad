// Counts of tasks, as form.cu and count.cu write them: row b of `counts` [kCountRows, K] is of block b.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Adds to lane k how many lanes have task k; -1 is none.
__device__ inline void add_counts(int tasks, int task, int& count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  FASTLIN_NO_UNROLL
  for (int k = 0; k < tasks; ++k) {
    const int found = __popc(__ballot_sync(0xffffffffu, task == k));
    if (lane == k) count += found;
  }
}

// Sequences of each block, whole tiles of `tile`.
inline std::int64_t share_of(std::int64_t sequences, int tile) {
  const std::int64_t tiles = (sequences + tile - 1) / tile;
  return (tiles + kCountRows - 1) / kCountRows * tile;
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
