// The sums over sequences of tokens.cu. The numbers of a tile lie in rows of 32 sequences in shared memory. A
// sum of dW is a product of two rows; a thread owns one of widths up to 11, and 2, 4 or 9 of wider ones,
// which share their loads. A sum of a task is that of a row over the bits of its sequences, so that a number
// that is not finite stays in its task.
#pragma once

#include "cuda/pieces.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Floats of a row of 32 sequences: eight rows that follow each other meet in no bank.
constexpr int kRow = 36;

template <int M>
struct Shape {
  static constexpr int rows = 2 * M + 1;  // of a warp's part: c, e, a . c
  static constexpr int w_row = (M + 3) / 4 * 4;
  static constexpr int piece = M <= 7 ? 16 : M <= 12 ? 8 : 4;   // tokens at most
  static constexpr int blocks = M <= 11 ? 4 : M == 12 ? 3 : 2;  // a multiprocessor, as registers allow
  // Sums of dW that a thread owns: rows i, i + threads_i, ... and columns likewise.
  static constexpr int own_i = M <= 11 ? 1 : M <= 22 ? 2 : 3, own_j = M <= 12 ? 1 : M <= 22 ? 2 : 3;
  static constexpr int threads_i = (M + own_i - 1) / own_i, threads_j = (M + own_j - 1) / own_j;
  static_assert(threads_i * threads_j <= kThreads);
  static constexpr int task_sums = (kMostTasks * rows + kThreads - 1) / kThreads;  // of a thread
  static constexpr int own_rows = (M + kWarps - 1) / kWarps;                       // of a warp
};

// The sums of a chunk that a thread owns.
template <int M>
struct Sums {
  using S = Shape<M>;
  float dW[S::own_i][S::own_j] = {}, task[S::task_sums] = {};

  // Rows of 32 sequences: c, r e and a . c in part 0, r q and squared errors in part 1. Number i of a task
  // is in this row: M of r e, M of r q, and the squared errors.
  static __device__ int row_of(int i) { return i < M ? M + i : M + 1 + i; }

  __device__ void add_dW(const float* parts) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= S::threads_i * S::threads_j) return;
    const float* rq = parts + (S::rows + thread / S::threads_j) * kRow;
    const float* c = parts + thread % S::threads_j * kRow;
    constexpr int chains = S::own_i * S::own_j == 1 ? 4 : 1;
    float tile[S::own_i][S::own_j][chains] = {};
    FASTLIN_UNROLL
    for (int s = 0; s < kTile; s += 4) {
      Quad left[S::own_i], right[S::own_j];
      FASTLIN_UNROLL
      for (int i = 0; i < S::own_i; ++i) left[i] = load_quad(rq + i * S::threads_i * kRow + s);
      FASTLIN_UNROLL
      for (int j = 0; j < S::own_j; ++j) right[j] = load_quad(c + j * S::threads_j * kRow + s);
      FASTLIN_UNROLL
      for (int k = 0; k < 4; ++k) {
        FASTLIN_UNROLL
        for (int i = 0; i < S::own_i; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < S::own_j; ++j) {
            tile[i][j][k % chains] = std::fma(left[i].x[k], right[j].x[k], tile[i][j][k % chains]);
          }
        }
      }
    }
    FASTLIN_UNROLL
    for (int i = 0; i < S::own_i; ++i) {
      FASTLIN_UNROLL
      for (int j = 0; j < S::own_j; ++j) {
        const float (&of)[chains] = tile[i][j];
        dW[i][j] += chains == 4 ? (of[0] + of[1 % chains]) + (of[2 % chains] + of[3 % chains]) : of[0];
      }
    }
  }

  // `k` is the task of this lane's sequence, -1 past the end.
  __device__ void add_tasks(const float* parts, int tasks, int k, bool gradients) {
    int mask[S::task_sums] = {};
    FASTLIN_NO_UNROLL
    for (int each = 0; each < tasks; ++each) {
      const int bits = static_cast<int>(__ballot_sync(0xffffffffu, k == each));
      FASTLIN_UNROLL
      for (int u = 0; u < S::task_sums; ++u) {
        if (number(u) / S::rows == each) mask[u] = bits;
      }
    }
    FASTLIN_UNROLL
    for (int u = 0; u < S::task_sums; ++u) {
      const int i = number(u) % S::rows;
      if (number(u) >= tasks * S::rows || (!gradients && i != 2 * M)) continue;
      float sum[2] = {};
      FASTLIN_UNROLL
      for (int s = 0; s < kTile; s += 4) {
        const Quad quad = load_quad(parts + row_of(i) * kRow + s);
        FASTLIN_UNROLL
        for (int b = 0; b < 4; ++b) sum[b % 2] += (mask[u] >> (s + b) & 1) != 0 ? quad.x[b] : 0.0f;
      }
      task[u] += sum[0] + sum[1];
    }
  }

  __device__ void store(const Work& work, float* to) const {
    const int m = static_cast<int>(work.P.m), thread = static_cast<int>(threadIdx.x);
    if (work.out.dW != nullptr && thread < S::threads_i * S::threads_j) {
      FASTLIN_UNROLL
      for (int u = 0; u < S::own_i; ++u) {
        FASTLIN_UNROLL
        for (int w = 0; w < S::own_j; ++w) {
          const int i = thread / S::threads_j + u * S::threads_i,
                    j = thread % S::threads_j + w * S::threads_j;
          if (i < m && j < m) to[work.numbers.dW + i * m + j] = dW[u][w];
        }
      }
    }
    FASTLIN_UNROLL
    for (int u = 0; u < S::task_sums; ++u) {
      const int k = number(u) / S::rows, i = number(u) % S::rows;
      const int j = i < M ? i : i - M;
      const std::int64_t column = i == 2 * M ? work.at.squares : i < M ? work.at.e : work.at.q;
      if (k < work.P.K && column >= 0 && (i == 2 * M || j < m)) {
        to[work.numbers.sums + k * work.at.width + column + (i == 2 * M ? 0 : j)] = task[u];
      }
    }
  }

 private:
  static __device__ int number(int u) { return static_cast<int>(threadIdx.x) + u * kThreads; }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
