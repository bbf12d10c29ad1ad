// The kernels that serve every call, of any width, dtype and number of heads. All random numbers, and all
// algebra of a sequence, are those of csrc/core, over the Vec of a warp.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {
// clang-format off: each file uses those before it.
#include "cuda/vec_warp.h"
#include "core/parts-inl.h"
#include "core/philox-inl.h"
#include "core/normal-inl.h"
#include "core/chi-inl.h"
#include "core/tile-inl.h"
#include "core/head-inl.h"
#include "cuda/tile_warp.h"
#include "core/draws-inl.h"
#include "core/sampler-inl.h"
#include "core/stack-inl.h"

// What threads of a block have written is seen by the others.
FASTLIN_HD inline void sync_block() {
#if defined(__CUDA_ARCH__) || defined(FASTLIN_EMULATED)
  __syncthreads();
#endif
}

#include "cuda/worker.h"
#include "cuda/trial.h"
// clang-format on

constexpr int kLanes = 32, kWarps = 4;  // of a block, at most

// Which sequences a tile has: those at positions first, first + 1, ... of the order.
template <class T>
__device__ void take(const Call<T>& call, const Context<T>& tile, std::int64_t first, int lanes) {
  const Problem<T>& P = call.P;
  const bool real = lane() < lanes;
  const std::int64_t position = first + (real ? lane() : lanes - 1);
  const std::int64_t sequence = call.order.sequence == nullptr ? position : call.order.sequence[position];
  const std::int64_t k = call.task(position);
  tile.sequence[lane()] = sequence;
  tile.task[lane()] = k;
  if (P.y != nullptr) tile.y[lane()] = real ? P.y[sequence] : T(0);
  if (call.at.squares >= 0) {
    tile.coefficient[lane()] = real ? error_coefficient(P, k, call.count(k), call.total()) : T(0);
  }
  const bool starts = real && (lane() == 0 || call.task(position - 1) != k);
  const unsigned bits = __ballot_sync(0xffffffffu, starts);
  if (lane() == 0) *tile.starts = bits;
  if (call.out.dq != nullptr) Tile<T>::zero(tile.dq, P.m);
  if (call.out.dx != nullptr) Tile<T>::zero(tile.dG, P.m * P.m);
}

// Threads (32, warps): block after block of tiles, and those of a CUDA block are gridDim.x apart.
template <class T, bool kStack>
__global__ void __launch_bounds__(kLanes* kWarps, 1) attention_kernel(const __grid_constant__ Call<T> call) {
  FASTLIN_SHARED_MEMORY(shared);
  const Problem<T>& P = call.P;
  const int warp = static_cast<int>(threadIdx.y), warps = static_cast<int>(blockDim.y);
  std::byte* base = call.scratch == nullptr ? reinterpret_cast<std::byte*>(shared)
                                            : call.scratch + blockIdx.x * call.scratch_bytes;
  Arena of_context(base), of_forming(base + call.context_bytes);
  Arena of_trial(base + call.context_bytes + warp * call.trial_bytes);
  const Context<T> tile(of_context, call);
  Forming<T> forming(of_forming, call, warp, warps);
  Trial<T, kStack> trial(of_trial, call);
  for (std::int64_t block = blockIdx.x; block < call.blocks; block += gridDim.x) {
    const std::int64_t begin = block * call.block_size;
    const std::int64_t end = begin + call.block_size < P.B ? begin + call.block_size : P.B;
    for (std::int64_t r = warp; r < P.R; r += warps) trial.clear(block, r);
    for (std::int64_t first = begin; first < end; first += kLanes) {
      const int lanes = static_cast<int>(end - first < kLanes ? end - first : kLanes);
      if (warp == 0) take(call, tile, first, lanes);
      sync_block();
      forming.form(tile, lanes);
      for (std::int64_t r = warp; r < P.R; r += warps) trial.run(tile, lanes, first, block, r);
      sync_block();
      if (call.of_data()) forming.store(tile, lanes);
    }
  }
}

// Task of sequence i of a call.
template <class T>
FASTLIN_HD std::int64_t drawn_task(const Source& S, std::int64_t i) {
  using W = Vec<std::uint64_t>;
  if (S.K == 1) return 0;
  const Philox<W> philox(S.seed, current_step(S), S.stream);
  W words[1][4];
  philox.start(philox.sequence(W::set(S.offset + static_cast<std::uint64_t>(i))), philox.block(0), words[0]);
  philox.finish(words);
  return Sampler<T>::task(S, i, static_cast<std::uint32_t>(words[0][0].x));
}

struct Warp {
  std::int64_t first = lane();
  static constexpr std::int64_t step = 32;
  FASTLIN_HD void sync() const { sync_lanes(); }
};

// Blocks of one warp. The first ones add the blocks' sums of 32 numbers of dW, dA and dC, in block order;
// each of the others joins the records of a task and trial, in block order, and writes its results.
template <class T>
__global__ void sums_kernel(const __grid_constant__ Call<T> call) {
  FASTLIN_SHARED_MEMORY(shared);
  const Problem<T>& P = call.P;
  const Results<T>& out = call.out;
  const std::int64_t of_matrices = (call.matrices + kLanes - 1) / kLanes;
  if (blockIdx.x < of_matrices) {
    const std::int64_t square = P.R * P.H * P.m * P.m, of_W = out.dW != nullptr ? square : 0;
    const std::int64_t of_A = out.dA != nullptr ? P.layers * square : 0;
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kLanes + lane();
    if (i >= call.matrices) return;
    double sum = 0;
    for (std::int64_t block = 0; block < call.blocks; ++block) sum += call.partial[block * call.matrices + i];
    T* to = i < of_W ? out.dW + i : i < of_W + of_A ? out.dA + (i - of_W) : out.dC + (i - of_W - of_A);
    *to = static_cast<T>(sum);
    return;
  }
  for (std::int64_t each = blockIdx.x - of_matrices; each < P.K * P.R; each += gridDim.x - of_matrices) {
    const std::int64_t k = each / P.R, r = each % P.R;
    const std::int64_t begin = call.order.start == nullptr ? 0 : call.order.start[k];
    const std::int64_t end = call.order.start == nullptr ? P.B : call.order.start[k + 1];
    double* record = call.record(k, r);
    for (std::int64_t i = lane(); i < call.at.width; i += kLanes) {
      double sum = 0;
      for (std::int64_t position = begin; position < end;) {
        const std::int64_t block = position / call.block_size, first = block * call.block_size;
        const std::int64_t last = (first + call.block_size < P.B ? first + call.block_size : P.B) - 1;
        sum += call.task(first) == k  ? call.end(block, false, r)[i]
               : call.task(last) == k ? call.end(block, true, r)[i]
                                      : record[i];
        position = last + 1;
      }
      record[i] = sum;
    }
    sync_lanes();
    finish_trial(P, call.out, call.at, k, r, call.count(k), record, reinterpret_cast<double*>(shared),
                 Warp{});
  }
}

template <class T>
__global__ void loss_kernel(const __grid_constant__ Call<T> call) {
  const Problem<T>& P = call.P;
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= P.R) return;
  const auto count = [&call](std::int64_t k) { return call.count(k); };
  call.out.loss[r] = weighted_loss(P, call.out.per_task + r * P.K, count, call.total());
}

// G [B, m, m] of tokens: a tile for each block of threads, which forms it as `attention_kernel` does.
template <class T>
__global__ void __launch_bounds__(kLanes* kWarps, 1) gram_kernel(const __grid_constant__ Call<T> call, T* G) {
  FASTLIN_SHARED_MEMORY(shared);
  const int warp = static_cast<int>(threadIdx.y);
  std::byte* base = call.scratch == nullptr ? reinterpret_cast<std::byte*>(shared)
                                            : call.scratch + blockIdx.x * call.scratch_bytes;
  Arena of_context(base), of_forming(base + call.context_bytes);
  const Context<T> tile(of_context, call);
  Forming<T> forming(of_forming, call, warp, static_cast<int>(blockDim.y));
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kLanes;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kLanes; first < call.P.B; first += step) {
    const int lanes = static_cast<int>(call.P.B - first < kLanes ? call.P.B - first : kLanes);
    if (warp == 0) take(call, tile, first, lanes);
    sync_block();
    forming.form(tile, lanes);
    forming.store_gram(tile, lanes, G);
    sync_block();
  }
}

// A batch that is drawn and kept: a tile for each warp, which is a block.
template <class T>
struct Drawing {
  Source S;
  std::int64_t B, m;
  bool is_gram;
  Sample<T> out;
  std::byte* scratch;  // for each CUDA block; null when it is in shared memory
  std::int64_t scratch_bytes;
};

template <class T>
class Drawn {
  using L = Tile<T>;
  static constexpr std::int64_t N = L::N, kTokens = Sampler<T>::kTokens;

 public:
  FASTLIN_HD Drawn(Arena& arena, const Drawing<T>& given)
      : given(given), S(given.S), m(given.m), sampler(arena, given.S) {
    sequence = arena.take<std::int64_t>(N);
    task = arena.take<std::int64_t>(N);
    y = arena.take<T>(N);
    q = arena.take<T>(m * N);
    x = arena.take<T>((given.is_gram ? m : kTokens) * m * N);
    staging = arena.take<T>(L::kStaging);
  }

  FASTLIN_HD void tile(std::int64_t first, int lanes) {
    sequence[lane()] = first + (lane() < lanes ? lane() : lanes - 1);
    task[lane()] = drawn_task<T>(S, sequence[lane()]);
    sampler.question(sequence, task, false, q, y);
    if (lane() < lanes) {
      given.out.task[sequence[lane()]] = task[lane()];
      given.out.y[sequence[lane()]] = y[lane()];
    }
    sync_lanes();
    store(q, m, m, 0, lanes, given.out.q);
    if (given.is_gram) {
      sampler.gram(x);
      store(x, m * m, m * m, 0, lanes, given.out.x);
      return;
    }
    for (std::int64_t token = 0; token < S.n; token += kTokens) {
      const std::int64_t count = S.n - token < kTokens ? S.n - token : kTokens;
      sampler.tokens(token, count, x);
      store(x, count * m, S.n * m, token * m, lanes, given.out.x);
    }
  }

 private:
  FASTLIN_HD void store(const T* values, std::int64_t count, std::int64_t length, std::int64_t column,
                        int lanes, T* to) {
    L::store_rows(values, count, sequence, length, column, lanes, 0, 1, staging, to);
  }

  const Drawing<T>& given;
  const Source& S;
  const std::int64_t m;
  Sampler<T> sampler;
  std::int64_t *sequence, *task;  // [lanes]
  T *y, *q, *x, *staging;         // [1], [m], [m or kTokens, m]
};

template <class T>
__global__ void __launch_bounds__(kLanes, 1) sample_kernel(const __grid_constant__ Drawing<T> given) {
  FASTLIN_SHARED_MEMORY(shared);
  Arena arena(given.scratch == nullptr ? reinterpret_cast<std::byte*>(shared)
                                       : given.scratch + blockIdx.x * given.scratch_bytes);
  Drawn<T> drawn(arena, given);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kLanes;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kLanes; first < given.B; first += step) {
    drawn.tile(first, static_cast<int>(given.B - first < kLanes ? given.B - first : kLanes));
  }
}

// Tasks [B]: a thread for each.
__global__ void sample_tasks_kernel(const __grid_constant__ Source S, std::int64_t B, std::int64_t* task) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < B; i += step) {
    task[i] = drawn_task<float>(S, i);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
