// What the loop of trials.cu reads, and how that gets into shared memory: the order of a part's sequences by
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
  static constexpr int lanes = M <= 12 ? 1 : M <= 22 ? 8 : 16;  // of a trial
  // Columns of W and dW that a lane owns. A last one that is left over (33 = 2 x 16 + 1) is shared by rows.
  static constexpr bool rest = lanes > 1 && M % lanes == 1;
  static constexpr int columns = rest ? M / lanes : (M + lanes - 1) / lanes;
  static constexpr int together = M <= 11 ? 2 : 1;                  // sequences that one load of W serves
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
  static constexpr int exchange = lanes == 1 ? 0 : (std::max(lanes * columns, 4 * quads) / 4 | 1) * 4;
  static constexpr int parameters(int slab) {
    return lanes == 1 ? slab * W : slab * row + kThreads / lanes * exchange;
  }
};

// How stored matrices are copied: 16 bytes a lane; 4 bytes, where they are not at multiples of 16 bytes; row
// after row, where rows do not follow one another.
enum class Copies { kQuads, kWhole, kRows };

// How a call is laid over blocks and shared memory; offsets in floats.
struct Plan {
  int slab, slabs;                     // trials of a block; blocks of a chunk
  int sets, tile;                      // sets of lanes that share a tile's sequences; sequences of a tile
  bool folds;                          // what is copied is not what the loop reads
  int tiles, buffer, copied, control;  // the tiles, floats of one, what is copied, `Control`
  int step;                            // of one lane: floats from its sequences to its next ones
  Copies copies;
  int bytes;
  float scale;

  template <int M>
  static Plan of(const Problem<float>& P, bool has_records);
};

// Sequences first, first + 1, ... of the part's order, all of one task.
struct Tile {
  int first, count, task;
};

// What a block knows beside its trials: in shared memory, not in registers.
struct Control {
  std::int64_t begin;    // first sequence of the chunk
  std::int64_t sums;     // where its row of `partial` starts
  int chunk_size, each;  // sequences of the chunk; of a part, at most
  std::int64_t part;     // first sequence of the part
  int size, next;        // sequences of the part; where in the chunk the next one starts
  Tile tiles[2];         // the one that is added, and the one that is copied
  int start[kMostTasks + 1];
  int found[kMostTasks * kWarps];
  float coefficients[kMostTasks];
  std::uint16_t order[kPart + kWarps];  // a warp reads one ahead
};

template <int M>
struct Stage {
  using S = Shape<M>;
  using Stored = RecordOf<M>;

  const Work& work;
  const Plan& plan;
  float* shared;
  Control* control;

  __device__ Stage(const Work& work, const Plan& plan, float* shared)
      : work(work), plan(plan), shared(shared), control(reinterpret_cast<Control*>(shared + plan.control)) {}

  __device__ float* tile(int buffer) const { return shared + plan.tiles + buffer * plan.buffer; }
  // Which sequence of the part is at a place of the order.
  __device__ int at(int place) const { return control->order[place]; }
  __device__ std::int64_t sequence(int place) const { return control->part + at(place); }

  __device__ int task_of(std::int64_t i) const {
    if (work.records == nullptr) return given_task(work, i);
    const float bits = work.records[(i - work.first) * Stored::floats + Stored::task];
    int task;
    std::memcpy(&task, &bits, sizeof task);
    return task;
  }

  // Sorts the part that starts so many sequences into the chunk by task; stable. A warp takes a piece of it;
  // lane k counts task k.
  __device__ void sort(int first) const {
    const std::int64_t part = control->begin + first;
    const int size = std::min(control->each, control->chunk_size - first);
    const int K = static_cast<int>(work.P.K), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // nobody reads the part before
    if (threadIdx.x == 0) {
      control->part = part, control->size = size, control->next = first + size;
      control->start[0] = 0, control->start[K] = size;
    }
    if (K == 1) {
      FASTLIN_NO_UNROLL
      for (int i = threadIdx.x; i < size; i += kThreads) control->order[i] = static_cast<std::uint16_t>(i);
    } else {
      const int piece = (size + 32 * kWarps - 1) / (32 * kWarps) * 32;
      const int begin = warp * piece, end = std::min(begin + piece, size);
      int sum = 0;
      FASTLIN_NO_UNROLL
      for (int i = begin; i < end; i += 32) {  // to count them
        const int task = i + lane < end ? task_of(part + i + lane) : -1;
        FASTLIN_NO_UNROLL
        for (int k = 0; k < K; ++k) {  // count
          const int same = __popc(__ballot_sync(0xffffffffu, task == k));
          if (lane == k) sum += same;
        }
      }
      if (lane < K) control->found[lane * kWarps + warp] = sum;
      __syncthreads();
      int place = 0;  // of the next sequence of task `lane` in this piece
      FASTLIN_NO_UNROLL
      for (int k = 0; k < K; ++k) {  // before them
        FASTLIN_UNROLL
        for (int w = 0; w < kWarps; ++w) {
          const int those = control->found[k * kWarps + w];
          if (k < lane || (k == lane && w < warp)) place += those;
        }
      }
      if (warp == 0 && lane > 0 && lane < K) control->start[lane] = place;
      FASTLIN_NO_UNROLL
      for (int i = begin; i < end; i += 32) {  // to place them
        const int task = i + lane < end ? task_of(part + i + lane) : -1;
        FASTLIN_NO_UNROLL
        for (int k = 0; k < K; ++k) {  // place
          const unsigned same = __ballot_sync(0xffffffffu, task == k);
          const int before = __shfl_sync(0xffffffffu, place, k) + __popc(same & ((1u << lane) - 1));
          if (task == k) control->order[before] = static_cast<std::uint16_t>(i + lane);
          if (lane == k) place += __popc(same);
        }
      }
    }
    __syncthreads();
  }

  // The tile behind another; its count is 0 at the end.
  __device__ Tile tile_after(const Tile& tile) const {
    const int first = tile.first + tile.count;
    int task = tile.task;
    if (first >= control->size) return {first, 0, task};
    FASTLIN_NO_UNROLL
    while (control->start[task + 1] <= first) ++task;
    return {first, std::min(plan.tile, control->start[task + 1] - first), task};
  }

  // Starts the copies of a tile. Behind it lies a sequence of zeros.
  __device__ void copy(const Tile& tile, int buffer) const {
    if (work.records != nullptr) {
      copy_records(tile, plan.folds ? shared + plan.copied : this->tile(buffer));
    } else {
      copy_matrices(tile, shared + plan.copied);
    }
    __pipeline_commit();
  }

  __device__ void copy_records(const Tile& tile, float* to) const {
    constexpr int quads = Stored::floats / 4;
    const float* from = work.records + (control->part - work.first) * Stored::floats;
    FASTLIN_NO_UNROLL
    for (int i = opaque(static_cast<int>(threadIdx.x)); i < tile.count * quads; i += kThreads) {
      const int s = i / quads, quad = i % quads;
      __pipeline_memcpy_async(to + 4 * i, from + (at(tile.first + s) * Stored::floats + 4 * quad), 16);
    }
    if (!plan.folds && threadIdx.x < quads)
      store_quad(to + tile.count * Stored::floats + 4 * threadIdx.x, {});
  }

  // The product of numbers that are not negative: one instruction.
  __device__ static std::int64_t far(int i, int step) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(i)) *
                                     static_cast<std::uint32_t>(step));
  }

  // A warp copies a sequence.
  __device__ void copy_matrices(const Tile& tile, float* to) const {
    const Problem<float>& P = work.P;
    // New for each tile: else the compiler keeps what depends on it, and registers are full.
    const int thread = opaque(static_cast<int>(threadIdx.x)), lane = thread % 32, warp = thread / 32;
    const int m = static_cast<int>(P.m), x_batch = opaque(static_cast<int>(P.x_batch));
    const int own = plan.copies == Copies::kQuads ? 4 * lane : lane;  // the lane's first number
    const int left = opaque(m * m - own);
    const std::int64_t part = control->part;
    const float* x = opaque(P.x + part * P.x_batch + own);
    // q, and y behind it: where they come from, and where they go, from the lane's first number.
    constexpr int kTurns = M / 32 + 1;
    const float* behind[kTurns];
    int step[kTurns], there[kTurns];
    FASTLIN_UNROLL
    for (int u = 0; u < kTurns; ++u) {
      const int j = lane + 32 * u;
      const bool is_q = j < m;
      behind[u] = opaque(is_q ? P.q + part * P.q_batch + j : P.y + part);
      step[u] = opaque(is_q ? static_cast<int>(P.q_batch) : 1);
      there[u] = is_q ? S::stored_q + j - own : j == m && P.y != nullptr ? S::stored_y - own : -1;
    }
    int at = warp * S::stored_floats + own;
    const std::uint16_t* order = control->order + tile.first + warp;
    int next = *order;
    const auto copy_each = [&](auto copy_one) {
      FASTLIN_NO_UNROLL
      for (int s = warp; s < tile.count; s += kWarps) {
        const int i = next;
        order += kWarps;
        next = *order;
        float* here = to + opaque(at);
        copy_one(here, opaque(x + far(i, x_batch)));
        FASTLIN_UNROLL
        for (int u = 0; u < kTurns; ++u) {
          if (there[u] >= 0) __pipeline_memcpy_async(here + there[u], behind[u] + far(i, step[u]), 4);
        }
        at += kWarps * S::stored_floats;
      }
    };
    if (plan.copies == Copies::kQuads) {
      copy_each([left](float* here, const float* G) {  // by 16 bytes
        FASTLIN_UNROLL
        for (int u = 0; u < M * M; u += 4 * 32) {
          if (u < left) __pipeline_memcpy_async(here + u, G + u, 16);
        }
      });
    } else if (plan.copies == Copies::kWhole) {
      copy_each([left](float* here, const float* G) {  // by 4 bytes
        FASTLIN_UNROLL
        for (int u = 0; u < M * M; u += 32) {
          if (u < left) __pipeline_memcpy_async(here + u, G + u, 4);
        }
      });
    } else {
      copy_each([&](float* here, const float* G) {  // rows apart
        FASTLIN_NO_UNROLL
        for (int row = 0; row < m; ++row, G += P.x_row) {
          FASTLIN_UNROLL
          for (int u = 0; u < M; u += 32) {
            if (lane < m - u) __pipeline_memcpy_async(here + row * m + u, G + u, 4);
          }
        }
      });
    }
  }

  // Where a number of a sequence comes from: half of each of two of the copied numbers; with see_query plus
  // the product of two more; or it is zero.
  struct From {
    int one, other, left, right;
    bool is_there;
  };

  __device__ From from(int number) const {
    const bool recorded = work.records != nullptr;
    const int m = recorded ? M : static_cast<int>(work.P.m), q = recorded ? Stored::q : S::stored_q;
    if (number >= S::q) {
      const int i = number - S::q, y = recorded ? Stored::y : S::stored_y, at = number == S::y ? y : q + i;
      return {at, at, 0, 0, number == S::y ? recorded || work.P.y != nullptr : i < m};
    }
    int i = number / S::row, j = number % S::row;
    if (S::lanes == 1) {
      i = 0;
      FASTLIN_UNROLL
      for (int row = 1; row < M; ++row) i += number >= row * M - row * (row - 1) / 2 ? 1 : 0;
      j = number - i * (2 * M - 1 - i) / 2;
    }
    const int low = std::min(i, j), high = std::max(i, j), in_triangle = low * (2 * M - 1 - low) / 2 + high;
    if (recorded) return {in_triangle, in_triangle, 0, 0, high < m};
    return {i * m + j, j * m + i, q + i, q + j, high < m};
  }

  // Turns what was copied of `count` sequences into a tile, with a sequence of zeros behind it. A thread
  // makes the same number of several sequences, four at a time.
  __device__ void fold(int count, float* tile) const {
    const float* copied = shared + plan.copied;
    if (S::lanes > 1 && work.records != nullptr) {
      fold_from<Stored::floats>(count, copied, tile, false);
    } else {
      fold_from<S::stored_floats>(count, copied, tile, work.P.see_query);
    }
  }

  template <int kFloats>
  __device__ void fold_from(int count, const float* copied, float* tile, bool see_query) const {
    constexpr int kSequences = std::max(kThreads / S::floats, 1), kOnce = 4;
    constexpr int kRead = kSequences * kFloats, kWritten = kSequences * S::floats;
    // New for each tile: else the compiler keeps where the number comes from, and registers are full.
    const int thread = opaque(static_cast<int>(threadIdx.x));
    const int own = kSequences == 1 ? 0 : thread / S::floats;
    const int first_number = kSequences == 1 ? thread : thread % S::floats;
    if (own >= kSequences) return;
    FASTLIN_NO_UNROLL
    for (int number = first_number; number < S::floats; number += kThreads) {
      const From it = from(number);
      const float* in = copied + own * kFloats;
      float* to = tile + own * S::floats + number;
      // Numbers that are not there read the first one.
      const float *one = in + (it.is_there ? it.one : 0), *other = in + (it.is_there ? it.other : 0);
      const float half = it.is_there ? 0.5f : 0;
      int left_over = count - own;
      const auto fold_each = [&](auto add) {
        FASTLIN_NO_UNROLL
        for (; left_over > 0; left_over -= kOnce * kSequences) {
          float x[kOnce], y[kOnce];
          FASTLIN_UNROLL
          for (int u = 0; u < kOnce; ++u) {
            if (u * kSequences < left_over) x[u] = one[u * kRead], y[u] = other[u * kRead];
          }
          FASTLIN_UNROLL
          for (int u = 0; u < kOnce; ++u) {
            x[u] = std::fma(half, x[u], half * y[u]);
            if (u * kSequences < left_over) to[u * kWritten] = add(x[u], u * kRead);
          }
          one += kOnce * kRead, other += kOnce * kRead, to += kOnce * kWritten;
        }
      };
      if (see_query) {
        const bool sees = it.is_there && number < S::q;
        const int left = it.left - it.one, right = it.right - it.one;
        fold_each([&](float x, int read) {  // with q q'
          return sees ? std::fma(one[left + read], one[right + read], x) : x;
        });
      } else {
        fold_each([](float x, int) { return x; });  // as it is
      }
      if (own == count % kSequences) tile[count * S::floats + number] = 0;
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
