// What trials.cu reads in its loop, and how that gets into shared memory: the order of a part's sequences by
// task, copies of their records or matrices, and the pass that turns those into what the loop reads.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
// A chunk is worked off in parts of at most so many sequences: their order by task, 16 bits each, takes 4 KB.
constexpr int kPart = 2048;

template <int M>
struct Shape {
  static constexpr int lanes = M <= 12 ? 1 : M <= 22 ? 8 : 16;    // of a trial
  static constexpr int columns = (M + lanes - 1) / lanes;         // of W and dW that a lane owns
  static constexpr int together = M <= 11 ? 2 : 1;                // sequences that one load of W serves
  static constexpr int quads = (M + 3) / 4, row = (quads | 1) * 4;  // of a row of G, of v, of a
  // A sequence as the loop reads it. One lane: its record. Several: G whole, rows of `row`; q; y.
  static constexpr int q = lanes == 1 ? RecordOf<M>::q : M * row;
  static constexpr int y = lanes == 1 ? RecordOf<M>::y : q + 4 * quads;
  static constexpr int floats = lanes == 1 ? RecordOf<M>::floats : y + 4;
  // A stored matrix as it is copied: G [m, m]; q; y.
  static constexpr int stored_q = (M * M + 3) / 4 * 4, stored_y = stored_q + M;
  static constexpr int stored_floats = (stored_y + 4) / 4 * 4;
  // Parameters of a trial. One lane: W, row after row. Several: v, and a of each group of lanes.
  static constexpr int W = ((M * M + 3) / 4 | 1) * 4;
  static constexpr int exchange = lanes == 1 ? 0 : (lanes * columns / 4 | 1) * 4;
  static constexpr int parameters(int slab) {
    return lanes == 1 ? slab * W : slab * row + kThreads / lanes * exchange;
  }
};

// How a call is laid over blocks and shared memory.
struct Plan {
  int slab, slabs;  // trials of a block; blocks of a chunk
  int sets, tile;   // sets of lanes that share a tile's sequences; sequences of a tile
  bool folds;       // what is copied is not what the loop reads
  int tiles, buffer, copied, order;  // floats before the tiles, of a tile, before the copied ones, before the order
  int bytes;

  template <int M>
  static Plan of(const Problem<float>& P, bool has_records);
};

// Sequences first, first + 1, ... of the part's order, all of one task.
struct Tile {
  int first, count, task;
};

template <int M>
struct Stage {
  using S = Shape<M>;
  using Stored = RecordOf<M>;

  const Work& work;
  const Plan& plan;
  float *tiles, *copied;
  std::uint16_t* order;  // [kPart]
  int *start, *found;    // [kMostTasks + 1] where each task starts; [kMostTasks, kWarps]
  std::int64_t part = 0;  // the first sequence
  int size = 0;

  __device__ Stage(const Work& work, const Plan& plan, float* shared) : work(work), plan(plan) {
    tiles = shared + plan.tiles;
    copied = shared + plan.copied;
    order = reinterpret_cast<std::uint16_t*>(shared + plan.order);
    start = reinterpret_cast<int*>(shared + plan.order) + kPart / 2;
    found = start + kMostTasks + 1;
  }

  __device__ float* tile(int buffer) const { return tiles + buffer * plan.buffer; }
  // Which sequence of the part is at a place of the order.
  __device__ int at(int place) const { return work.P.K == 1 ? place : order[place]; }

  __device__ int task_of(int i) const {
    if (work.records == nullptr) return given_task(work, part + i);
    int task;
    std::memcpy(&task, work.records + (part - work.first + i) * Stored::floats + Stored::task, sizeof task);
    return task;
  }

  // Sorts a part by task; stable. A warp takes a piece of it; lane k counts task k.
  __device__ void sort(std::int64_t first, int count) {
    part = first, size = count;
    const int K = static_cast<int>(work.P.K), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // nobody reads the order of the part before
    if (K == 1) {
      if (threadIdx.x < 2) start[threadIdx.x] = threadIdx.x == 0 ? 0 : count;
      __syncthreads();
      return;
    }
    const int piece = (count + 32 * kWarps - 1) / (32 * kWarps) * 32;
    const int begin = warp * piece, end = std::min(begin + piece, count);
    int sum = 0;
    FASTLIN_NO_UNROLL
    for (int i = begin; i < end; i += 32) {
      const int task = i + lane < end ? task_of(i + lane) : -1;
      FASTLIN_NO_UNROLL
      for (int k = 0; k < K; ++k) {
        const int same = __popc(__ballot_sync(0xffffffffu, task == k));
        if (lane == k) sum += same;
      }
    }
    if (lane < K) found[lane * kWarps + warp] = sum;
    __syncthreads();
    int place = 0;  // of the next sequence of task `lane` in this piece
    FASTLIN_NO_UNROLL
    for (int k = 0; k < K; ++k) {
      FASTLIN_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const int those = found[k * kWarps + w];
        if (k < lane || (k == lane && w < warp)) place += those;
      }
    }
    if (warp == 0 && lane <= K) start[lane] = place;
    FASTLIN_NO_UNROLL
    for (int i = begin; i < end; i += 32) {
      const int task = i + lane < end ? task_of(i + lane) : -1;
      FASTLIN_NO_UNROLL
      for (int k = 0; k < K; ++k) {
        const unsigned same = __ballot_sync(0xffffffffu, task == k);
        const int first_place = __shfl_sync(0xffffffffu, place, k);
        if (task == k) order[first_place + __popc(same & ((1u << lane) - 1))] = static_cast<std::uint16_t>(i + lane);
        if (lane == k) place += __popc(same);
      }
    }
    __syncthreads();
  }

  // The tile that starts at a place of the order; its count is 0 at the end.
  __device__ Tile tile_at(int first, int task) const {
    if (first >= size) return {first, 0, task};
    FASTLIN_NO_UNROLL
    while (start[task + 1] <= first) ++task;
    return {first, std::min(plan.tile, start[task + 1] - first), task};
  }

  // Starts the copies of a tile. Behind it lies a sequence of zeros.
  __device__ void copy(const Tile& tile, int buffer) const {
    if (work.records != nullptr) {
      copy_records(tile, plan.folds ? copied : this->tile(buffer));
    } else {
      copy_matrices(tile);
    }
    __pipeline_commit();
  }

  __device__ void copy_records(const Tile& tile, float* to) const {
    constexpr int quads = Stored::floats / 4;
    const float* from = work.records + (part - work.first) * Stored::floats;
    FASTLIN_NO_UNROLL
    for (int i = threadIdx.x; i < tile.count * quads; i += kThreads) {
      const int s = i / quads, quad = i % quads;
      __pipeline_memcpy_async(to + 4 * i, from + (at(tile.first + s) * Stored::floats + 4 * quad), 16);
    }
    if (!plan.folds && threadIdx.x < quads) store_quad(to + tile.count * Stored::floats + 4 * threadIdx.x, {});
  }

  // A warp copies a matrix, or a row of it where rows do not follow one another.
  __device__ void copy_matrices(const Tile& tile) const {
    const Problem<float>& P = work.P;
    const int m = static_cast<int>(P.m), lane = threadIdx.x % 32;
    const bool whole = P.x_row == P.m;
    const int rows = whole ? 1 : m, length = whole ? m * m : m;
    const bool aligned = whole && m % 2 == 0 && P.x_batch % 4 == 0 && reinterpret_cast<std::uintptr_t>(P.x) % 16 == 0;
    FASTLIN_NO_UNROLL
    for (int s = threadIdx.x / 32; s < tile.count; s += kWarps) {
      const std::int64_t i = part + at(tile.first + s);
      const float *G = P.x + i * P.x_batch, *q = P.q + i * P.q_batch;
      float* to = copied + s * S::stored_floats;
      if (aligned) {
        FASTLIN_UNROLL
        for (int u = 0; u < M * M; u += 4 * 32) {
          const int j = u + 4 * lane;
          if (j < length) __pipeline_memcpy_async(to + j, G + j, 16);
        }
      } else {
        FASTLIN_NO_UNROLL
        for (int row = 0; row < rows; ++row) {
          FASTLIN_UNROLL
          for (int u = 0; u < M * M; u += 32) {
            const int j = u + lane;
            if (j < length) __pipeline_memcpy_async(to + row * m + j, G + row * P.x_row + j, 4);
          }
        }
      }
      FASTLIN_UNROLL
      for (int u = 0; u <= M; u += 32) {
        const int j = u + lane;
        if (j < m) __pipeline_memcpy_async(to + S::stored_q + j, q + j, 4);
        if (j == m && P.y != nullptr) __pipeline_memcpy_async(to + S::stored_y, P.y + i, 4);
      }
    }
  }

  // Where a number of the tile comes from: the mean of two of the copied numbers, or nowhere; with see_query
  // the product of two more.
  struct From {
    int one, other, left, right;
  };

  __device__ From from(int number) const {
    const bool recorded = work.records != nullptr;
    const int m = recorded ? M : static_cast<int>(work.P.m), q = recorded ? Stored::q : S::stored_q;
    if (number >= S::y) {
      const int y = recorded ? Stored::y : work.P.y != nullptr ? S::stored_y : -1;
      return number == S::y ? From{y, y, -1, -1} : From{-1, -1, -1, -1};
    }
    if (number >= S::q) {
      const int i = number - S::q;
      return i < m ? From{q + i, q + i, -1, -1} : From{-1, -1, -1, -1};
    }
    int i = number / S::row, j = number % S::row;
    if constexpr (S::lanes == 1) {
      i = 0, j = number;
      FASTLIN_UNROLL
      for (int row = 0; row < M; ++row) {
        if (i == row && j >= M) j -= M - row - 1, ++i;
      }
    }
    if (i >= m || j >= m) return {-1, -1, -1, -1};
    const int low = std::min(i, j), high = std::max(i, j);
    const int in_triangle = low * M - low * (low + 1) / 2 + high;
    if (recorded) return {in_triangle, in_triangle, -1, -1};
    return {i * m + j, j * m + i, work.P.see_query ? q + i : -1, q + j};
  }

  // Turns what was copied of `count` sequences into a tile, with a sequence of zeros behind it. A thread
  // makes the same number of several sequences, four at a time.
  __device__ void fold(int count, float* tile) const {
    constexpr int step = S::floats < kThreads ? kThreads / S::floats : 1;
    const int floats = work.records != nullptr ? Stored::floats : S::stored_floats;
    const int own = step == 1 ? 0 : threadIdx.x / S::floats;
    FASTLIN_NO_UNROLL
    for (int number = step == 1 ? threadIdx.x : threadIdx.x % S::floats; number < S::floats && own < step;
         number += kThreads) {
      const From it = from(number);
      FASTLIN_NO_UNROLL
      for (int first = own; first <= count; first += 4 * step) {
        float one[4], other[4];
        FASTLIN_UNROLL
        for (int u = 0; u < 4; ++u) {
          const int s = first + u * step;
          const bool is_there = s < count && it.one >= 0;
          one[u] = is_there ? copied[s * floats + it.one] : 0;
          other[u] = is_there ? copied[s * floats + it.other] : 0;
        }
        FASTLIN_UNROLL
        for (int u = 0; u < 4; ++u) {
          const int s = first + u * step;
          float x = std::fma(0.5f, one[u], 0.5f * other[u]);
          if (it.left >= 0 && s < count) {
            x = std::fma(copied[s * floats + it.left], copied[s * floats + it.right], x);
          }
          if (s <= count) tile[s * S::floats + number] = x;
        }
      }
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
