// A sequence of a stack on a group of lanes: which lane has what, where its matrices and vectors lie, and the
// products. stack.cu has the algebra.
//
// A matrix of a sequence lies in shared memory column after column, each in whole quads. Lane l of the group
// owns columns l, l + lanes, ...; beyond m = 12 the group has two parts, and each half of the rows. So a
// lane's tile is 12 rows of 3 columns at m = 11, 12, 21 and 22. A product takes the left factor as quads of
// its columns, which the lanes of a part share as a broadcast, and the right factor from the lane's own
// columns: 3 loads serve 36 multiply-adds.
#pragma once

#include "cuda/stack_layout.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

template <int M>
using StackTile = float[StackShape<M>::columns][StackShape<M>::rows];
template <int M>
using StackColumns = float[StackShape<M>::columns][M];
template <int M>
using StackOwn = float[StackShape<M>::columns];

// A lane of a group. Lanes without a sequence do what the first one does, and write nothing.
template <int M>
struct StackLane {
  using S = StackShape<M>;
  using Tile = StackTile<M>;
  using Columns = StackColumns<M>;
  using Own = StackOwn<M>;

  int sequence, part, column;
  bool writes;

  __device__ explicit StackLane(int lane) {
    writes = S::uses_all_lanes || lane < S::group * S::sequences;
    if (!writes) lane = 0;
    sequence = lane / S::group;
    part = S::parts == 1 ? 0 : lane % S::group / S::lanes;
    column = lane % S::lanes;
    if (!S::uses_all_lanes) column = lane % S::group % S::lanes;
  }

  __device__ FASTLIN_INLINE int first_row() const { return part * 4 * S::row_quads; }
  // Where its tile starts in a matrix, and the distance of its columns.
  __device__ FASTLIN_INLINE int tile() const { return column * S::column + first_row(); }
  static constexpr int step = S::lanes * S::column;

  // Own columns of the transpose of a matrix.
  __device__ FASTLIN_INLINE void load_across(const float* matrix, Columns& to) const {
    const float* from = matrix + column;
    FASTLIN_UNROLL
    for (int k = 0; k < M; ++k) {
      FASTLIN_UNROLL
      for (int j = 0; j < S::columns; ++j) to[j][k] = from[k * S::column + j * S::lanes];
    }
  }

  // tile += left right, of a left matrix and the lane's columns of the right one.
  __device__ FASTLIN_INLINE void multiply(const float* left, const Columns& right, Tile& to) const {
    const float* from = left + first_row();
    FASTLIN_UNROLL
    for (int k = 0; k < M; ++k) {
      FASTLIN_UNROLL
      for (int q = 0; q < S::row_quads; ++q) {
        const Quad quad = load_quad(from + k * S::column + 4 * q);
        FASTLIN_UNROLL
        for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < S::columns; ++j) {
            to[j][4 * q + i] = std::fma(quad.x[i], right[j][k], to[j][4 * q + i]);
          }
        }
      }
    }
  }

  // The same with the right factor in shared memory, or its transpose. Wide ones are loaded by pieces of four
  // rows: all of 33 would take 99 registers.
  __device__ FASTLIN_INLINE void multiply_from(const float* left, const float* right, bool is_transposed,
                                               Tile& to) const {
    const float* from = left + first_row();
    FASTLIN_UNROLL
    for (int k = 0; k < M; k += 4) {
      float piece[S::columns][4];
      FASTLIN_UNROLL
      for (int j = 0; j < S::columns; ++j) {
        if (is_transposed) {
          FASTLIN_UNROLL
          for (int n = 0; n < 4 && k + n < M; ++n) {
            piece[j][n] = right[column + (k + n) * S::column + j * S::lanes];
          }
        } else {
          const Quad quad = load_quad(right + column * S::column + j * step + k);
          FASTLIN_UNROLL
          for (int n = 0; n < 4; ++n) piece[j][n] = quad.x[n];
        }
      }
      FASTLIN_UNROLL
      for (int n = 0; n < 4 && k + n < M; ++n) {
        FASTLIN_UNROLL
        for (int q = 0; q < S::row_quads; ++q) {
          const Quad quad = load_quad(from + (k + n) * S::column + 4 * q);
          FASTLIN_UNROLL
          for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) {
            FASTLIN_UNROLL
            for (int j = 0; j < S::columns; ++j) {
              to[j][4 * q + i] = std::fma(quad.x[i], piece[j][n], to[j][4 * q + i]);
            }
          }
        }
      }
    }
  }

  // The rows below each column's diagonal of a symmetric product, and some above it; then the other rows from
  // what the lanes store: 231 of 363 multiply-adds at m = 11.
  static constexpr bool is_below(int j, int quad) { return 4 * quad + 3 >= j * S::lanes; }
  __device__ FASTLIN_INLINE void multiply_below(const float* left, const Columns& right, Tile& to) const {
    FASTLIN_UNROLL
    for (int k = 0; k < M; ++k) {
      FASTLIN_UNROLL
      for (int q = 0; q < S::row_quads; ++q) {
        const Quad quad = load_quad(left + k * S::column + 4 * q);
        FASTLIN_UNROLL
        for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) {
          FASTLIN_UNROLL
          for (int j = 0; j < S::columns; ++j) {
            if (is_below(j, q)) to[j][4 * q + i] = std::fma(quad.x[i], right[j][k], to[j][4 * q + i]);
          }
        }
      }
    }
  }
  __device__ FASTLIN_INLINE void load_above(const float* matrix, Tile& to) const {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      FASTLIN_UNROLL
      for (int i = 0; i < S::rows; ++i) {
        if (!is_below(j, i / 4)) to[j][i] = matrix[column + i * S::column + j * S::lanes];
      }
    }
  }

  __device__ FASTLIN_INLINE void store(const Tile& from, float* matrix) const {
    if (!writes) return;
    float* to = matrix + tile();
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      FASTLIN_UNROLL
      for (int q = 0; q < S::row_quads; ++q) {
        Quad quad;
        FASTLIN_UNROLL
        for (int i = 0; i < 4; ++i) quad.x[i] = 4 * q + i < S::rows ? from[j][4 * q + i] : 0.0f;
        store_quad(to + j * step + 4 * q, quad);
      }
    }
  }
  // As the transpose.
  __device__ FASTLIN_INLINE void store_across(const Tile& from, float* matrix) const {
    if (!writes) return;
    float* to = matrix + first_row() * S::column + column;
    FASTLIN_UNROLL
    for (int i = 0; i < S::rows; ++i) {
      if (S::parts > 1 && S::width < S::column && first_row() + i >= S::width) continue;
      FASTLIN_UNROLL
      for (int j = 0; j < S::columns; ++j) to[i * S::column + j * S::lanes] = from[j][i];
    }
  }

  // A quad of rows of a tile, from its first to S::row_quads - 1.
  __device__ FASTLIN_INLINE Quad rows(const float* vector, int q) const {
    return load_quad(vector + first_row() + 4 * q);
  }
  __device__ FASTLIN_INLINE void own(const float* vector, Own& to) const {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) to[j] = vector[column + j * S::lanes];
  }
  __device__ FASTLIN_INLINE void put(const Own& from, float* vector) const {
    if (!writes || part != 0) return;
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) vector[column + j * S::lanes] = from[j];
  }

  // tile += x y', of a vector in shared memory and own entries of the other one.
  __device__ FASTLIN_INLINE void add_outer(const float* x, const Own& y, Tile& to) const {
    FASTLIN_UNROLL
    for (int q = 0; q < S::row_quads; ++q) {
      const Quad quad = rows(x, q);
      FASTLIN_UNROLL
      for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < S::columns; ++j) {
          to[j][4 * q + i] = std::fma(quad.x[i], y[j], to[j][4 * q + i]);
        }
      }
    }
  }

  // tile += matrix'
  __device__ FASTLIN_INLINE void add_across(const float* matrix, Tile& to) const {
    const float* from = matrix + first_row() * S::column + column;
    FASTLIN_UNROLL
    for (int i = 0; i < S::rows; ++i) {
      if (S::parts > 1 && S::width < S::column && first_row() + i >= S::width) continue;
      FASTLIN_UNROLL
      for (int j = 0; j < S::columns; ++j) to[j][i] += from[i * S::column + j * S::lanes];
    }
  }

  // Own entries of y + matrix' x: of own columns, of a tile, of a matrix in shared memory; and of y + matrix
  // x.
  __device__ FASTLIN_INLINE void apply_columns(const Columns& matrix, const float* x, Own& y) const {
    FASTLIN_UNROLL
    for (int k = 0; k < M; k += 4) {
      const Quad quad = load_quad(x + k);
      FASTLIN_UNROLL
      for (int i = 0; i < 4 && k + i < M; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < S::columns; ++j) y[j] = std::fma(quad.x[i], matrix[j][k + i], y[j]);
      }
    }
  }
  __device__ FASTLIN_INLINE void apply(const Tile& matrix, const float* x, Own& y) const {
    Own sum;
    start(y, sum);
    FASTLIN_UNROLL
    for (int q = 0; q < S::row_quads; ++q) {
      const Quad quad = rows(x, q);
      FASTLIN_UNROLL
      for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < S::columns; ++j) sum[j] = std::fma(quad.x[i], matrix[j][4 * q + i], sum[j]);
      }
    }
    add_parts(sum, y);
  }
  __device__ FASTLIN_INLINE void apply(const float* matrix, const float* x, Own& y) const {
    const float* from = matrix + tile();
    Own sum;
    start(y, sum);
    FASTLIN_UNROLL
    for (int q = 0; q < S::row_quads; ++q) {
      const Quad quad = rows(x, q);
      FASTLIN_UNROLL
      for (int j = 0; j < S::columns; ++j) {
        const Quad column = load_quad(from + j * step + 4 * q);
        FASTLIN_UNROLL
        for (int i = 0; i < 4 && 4 * q + i < S::rows; ++i) sum[j] = std::fma(quad.x[i], column.x[i], sum[j]);
      }
    }
    add_parts(sum, y);
  }
  __device__ FASTLIN_INLINE void apply_across(const float* matrix, const float* x, Own& y) const {
    const float* from = matrix + column;
    FASTLIN_UNROLL
    for (int k = 0; k < M; k += 4) {
      const Quad quad = load_quad(x + k);
      FASTLIN_UNROLL
      for (int i = 0; i < 4 && k + i < M; ++i) {
        FASTLIN_UNROLL
        for (int j = 0; j < S::columns; ++j) {
          y[j] = std::fma(quad.x[i], from[(k + i) * S::column + j * S::lanes], y[j]);
        }
      }
    }
  }

  // The sum over the lanes of a group, the same bits in all of them.
  __device__ FASTLIN_INLINE float sum(float x) const {
    if constexpr ((S::lanes & (S::lanes - 1)) == 0) {
      FASTLIN_UNROLL
      for (int bits = 1; bits < S::lanes; bits *= 2) x += __shfl_xor_sync(kAllLanes, x, bits);
      return x;
    } else {
      float total = 0;
      FASTLIN_UNROLL
      for (int l = 0; l < S::lanes; ++l) total += __shfl_sync(kAllLanes, x, sequence * S::group + l);
      return total;
    }
  }

 private:
  // Sums of one part start with y; those of two are added to it.
  __device__ FASTLIN_INLINE static void start(const Own& y, Own& sum) {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) sum[j] = S::parts == 1 ? y[j] : 0.0f;
  }
  __device__ FASTLIN_INLINE void add_parts(const Own& sum, Own& y) const {
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      if constexpr (S::parts == 1) {
        y[j] = sum[j];
      } else {
        const int other = sequence * S::group + (1 - part) * S::lanes + column;
        y[j] += sum[j] + __shfl_sync(kAllLanes, sum[j], other);
      }
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace fastlin
