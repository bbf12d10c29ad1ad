// A sequence of a stack on a group of lanes: which lane has what, where its matrices and vectors lie, and the
// products. stack.cu has the algebra.
//
// A matrix of a sequence lies in shared memory column after column, each in whole quads. Lane l of the group
// owns columns l, l + lanes, ...; beyond m = 12 the group has two parts, and each half of the rows. So a
// lane's tile is 12 rows of 3 columns at m = 11, 12, 21 and 22. A product takes the left factor as quads of
// its columns, which the lanes of a part share as a broadcast, and the right factor from the lane's own
// columns: 3 loads serve 36 multiply-adds.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// Vectors of a sequence, by their place in its memory. The first seven are the right factors of the outer
// products of dA, dC and dW, in the order of `kProducts`, and the next six the left factors of all but the
// first, which is q.
enum StackVector {
  kGcqb, kGcv, kGca, kQb, kV, kA, kRc, kGa, kGTv, kGaq, kGaga, kGaw, kQn, kTa, kU, kAq, kCqb, kAga, kAw, kCa,
  kVectors
};
constexpr int kProducts = 7;

template <int M>
struct StackShape {
  // 33 has no good cut: 11 lanes of 3 columns in two parts of 20 rows leave ten lanes idle.
  static constexpr int lanes = M <= 7 ? 2 : M <= 12 ? 4 : M <= 22 ? 8 : 11, parts = M <= 12 ? 1 : 2;
  static constexpr int columns = (M + lanes - 1) / lanes;                          // of a lane
  static constexpr int row_quads = ((M + 3) / 4 + parts - 1) / parts;              // of a part
  static constexpr int quads = parts * row_quads, column = 4 * quads;              // of a column
  static constexpr int rows = parts == 1 ? M : 4 * row_quads;                      // that a lane computes
  static constexpr int width = lanes * columns, matrix = width * column;           // columns stored, floats
  static constexpr int group = lanes * parts, sequences = 32 / group, tile = columns * rows;
  static constexpr bool uses_all_lanes = group * sequences == 32;
  // The sums of dA and dC over a lane's sequences fit into its registers.
  static constexpr bool keeps_sums = tile <= 36;
  // Vectors and G of the last layer share memory where no vector needs zeros behind its entries.
  static constexpr bool shares_work = parts == 1 || width == column;
  // Where vectors start in the memory of a sequence, in columns; vectors that are in use together with the
  // matrix at work: qb, two more, and e, q and dp of each token, which go to the sums.
  static constexpr int vectors = shares_work ? 0 : width, qb = shares_work ? width : vectors, numbers =
      std::max(vectors + kVectors, qb + 3 + 2) - 2;
  // Both a parameter and its transpose are in shared memory.
  static constexpr bool has_both = M <= 22;
  // Sums of outer products of vectors, by tiles of 4 x 4. Narrow ones are a job for each of the 7 products,
  // in registers; wide ones a job for each of the 3 matrices, in shared memory.
  static constexpr int side = (M + 3) / 4, tiles = side * side;
  static constexpr bool splits_products = M <= 12;
  static constexpr int jobs = (splits_products ? 7 : 3) * tiles, passes = (jobs + 31) / 32;
};

// Where everything lies in shared memory, in floats.
struct StackLayout {
  int layers, dense, K, t;  // matrix layers, and those of them that are computed with matrices
  float scale, first_skip, skip, last_skip;
  // Parameters: A' and C' of the dense layers; A', C' of the last one and W', then A, C, W. A, W with `scale`.
  int A, C, last;
  // By task: v, C v, h [K, column]; p, C' p of the first layer [K, t, column]; coefficients [K].
  int v, Cv, h, p, Cp, coefficients;
  int warps, warp0, warp;  // of a block; the first one's memory, and its size
  // In the memory of a warp: tasks, squared errors [K, sequences], sums [streams, K, 2 + t, column],
  // sums of dA and dC [dense, 2, 32, tile] unless in registers, tiles [jobs, 16] unless in registers, parts of
  // lanes in the sums.
  int tasks, squares, sums, streams, accumulated, tiles, parts, sequences;
  // In the memory of a sequence, after a matrix at work and the vectors: q of all layers; G, X', G T of each
  // dense layer; two more matrices.
  int sequence, queries, first_dense, extra;
  int floats;

  bool fits() const { return warps > 0; }
};

template <int M>
StackLayout stack_layout(const Problem<float>& P) {
  using S = StackShape<M>;
  StackLayout at{};
  at.layers = static_cast<int>(P.layers), at.dense = at.layers - 1, at.K = static_cast<int>(P.K);
  at.scale = static_cast<float>(P.scale), at.first_skip = static_cast<float>(P.first_skip);
  at.skip = static_cast<float>(P.skip), at.last_skip = static_cast<float>(P.last_skip);
  at.t = P.p != nullptr ? static_cast<int>(std::min<std::int64_t>(P.t, 1 << 12)) : 0;
  int used = 0;
  const auto take = [&used](int floats) {
    const int first = used;
    used += (floats + 3) / 4 * 4;
    return first;
  };
  at.A = take(at.dense * S::matrix), at.C = take(at.dense * S::matrix);
  at.last = take((S::has_both ? 6 : 3) * S::matrix);
  at.v = take(at.K * S::column), at.Cv = take(at.K * S::column), at.h = take(at.K * S::column);
  at.p = take(at.K * at.t * S::column), at.Cp = take(at.K * at.t * S::column);
  at.coefficients = take(at.K);
  at.warp0 = used;

  used = 0;
  take((S::numbers + 2 + at.t) * S::column);
  at.queries = take(at.layers * S::column);
  at.first_dense = take(at.dense * 3 * S::matrix);
  at.extra = take(at.dense > 1 ? 2 * S::matrix : 0);
  at.sequence = (used / 4 | 1) * 4;

  used = 0;
  at.tasks = take(S::sequences), at.squares = take(at.K * S::sequences);
  const int numbers = (2 + at.t) * S::quads;
  at.streams = std::clamp(32 / numbers, 1, S::sequences);
  at.sums = take(at.streams * at.K * numbers * 4);
  at.accumulated = take(at.dense > 1 || !S::keeps_sums ? at.dense * 64 * S::tile : 0);
  at.tiles = take(S::splits_products ? 0 : S::jobs * 16);
  at.parts = take(32 * (1 + (S::splits_products ? S::passes : 0)));
  at.sequences = used;
  // The sums that are in registers come here in the end.
  const int end = (at.dense == 1 && S::keeps_sums ? 64 * S::tile : 0) + (S::splits_products ? S::jobs * 16 : 0);
  at.warp = (at.sequences + std::max(S::sequences * at.sequence, end) + 3) / 4 * 4;
  at.warps = std::clamp((kSharedBytes / 4 - at.warp0) / at.warp, 0, 4);
  at.floats = at.warp0 + at.warps * at.warp;
  return at;
}

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

  // Own columns of a matrix, or own rows of it as columns of the transpose.
  __device__ FASTLIN_INLINE void load(const float* matrix, Columns& to) const {
    const float* from = matrix + column * S::column;
    FASTLIN_UNROLL
    for (int j = 0; j < S::columns; ++j) {
      FASTLIN_UNROLL
      for (int k = 0; k < M; k += 4) {
        const Quad quad = load_quad(from + j * step + k);
        FASTLIN_UNROLL
        for (int i = 0; i < 4 && k + i < M; ++i) to[j][k + i] = quad.x[i];
      }
    }
  }
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

  // Own entries of y + matrix' x: of own columns, of a tile, of a matrix in shared memory; and of y + matrix x.
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
