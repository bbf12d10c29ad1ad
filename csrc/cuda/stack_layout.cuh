// Sizes of a stack's groups of lanes, and where a block has what in shared memory.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Vectors of a sequence, by their place in its memory; G, T, A, C of the last matrix layer, and a times
// dloss/dyhat. First the right factors of the outer products of dA, dC and dW, then the left ones; the first
// left one is q.
enum StackVector {
  kGCqb,
  kGCv,
  kGCa,
  kQb,
  kV,
  kA,
  kC,  // c times dloss/dyhat
  kGTa,
  kGTv,
  kGAq,    // G A' q
  kGAGTa,  // G A' G T a
  kGAGTv,  // G A' G T v
  kQn,     // q of the layer after them
  kTa,
  kTv,
  kAq,  // A' q
  kCqb,
  kAGTa,  // A' G T a
  kAGTv,  // A' G T v
  kCa,
  kVectors
};
constexpr int kProducts = 7;

template <int M>
struct StackShape {
  // 33 has no good cut: 11 lanes of 3 columns in two parts of 20 rows leave ten lanes idle.
  static constexpr int lanes = M <= 7 ? 2 : M <= 12 ? 4 : M <= 22 ? 8 : 11, parts = M <= 12 ? 1 : 2;
  static constexpr int columns = (M + lanes - 1) / lanes;                 // of a lane
  static constexpr int row_quads = ((M + 3) / 4 + parts - 1) / parts;     // of a part
  static constexpr int quads = parts * row_quads, column = 4 * quads;     // of a column
  static constexpr int rows = parts == 1 ? M : 4 * row_quads;             // that a lane computes
  static constexpr int width = lanes * columns, matrix = width * column;  // columns stored, floats
  static constexpr int group = lanes * parts, sequences = 32 / group, tile = columns * rows;
  static constexpr bool uses_all_lanes = group * sequences == 32;
  // The sums of dA and dC over a lane's sequences fit into its registers.
  static constexpr bool keeps_sums = tile <= 36;
  // Vectors and G of the last layer share memory where no vector needs zeros behind its entries.
  static constexpr bool shares_work = parts == 1 || width == column;
  // In the memory of a sequence, in columns: where its vectors start; where those start that are in use
  // together with the matrix at work, qb and two more; and e, q and dp of each token, which go to the sums.
  // T' p waits where dp will be.
  static constexpr int vectors = shares_work ? 0 : width, qb = shares_work ? width : vectors;
  static constexpr int numbers = std::max(vectors + kVectors, qb + 5) - 2;
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
  // Parameters: A' and C' of the dense layers; A', C' of the last one and W', then A, C, W. A, W with
  // `scale`.
  int A, C, last;
  // By task: v, C v, h [K, column]; p, C' p of the first layer [K, t, column]; coefficients [K].
  int v, Cv, h, p, Cp, coefficients;
  int warps, warp0, warp;  // of a block; the first one's memory, and its size
  // In the memory of a warp: tasks, squared errors [K, sequences], sums [streams, K, 2 + t, column],
  // sums of dA and dC [dense, 2, 32, tile] unless in registers, tiles [jobs, 16] unless in registers, parts
  // of lanes in the sums.
  int tasks, squares, sums, streams, accumulated, tiles, parts, sequences;
  // In the memory of a sequence, after a matrix at work and the vectors: q of all layers; G, X', G T of each
  // dense layer; two more matrices.
  int sequence, queries, first_dense, extra;
  int floats;  // of a block
};

template <int M>
StackLayout stack_layout(const Problem<float>& P) {
  using S = StackShape<M>;
  StackLayout at{};
  at.layers = static_cast<int>(P.layers), at.dense = at.layers - 1, at.K = static_cast<int>(P.K);
  at.scale = static_cast<float>(P.scale), at.first_skip = static_cast<float>(P.first_skip);
  at.skip = static_cast<float>(P.skip), at.last_skip = static_cast<float>(P.last_skip);
  at.t = P.p != nullptr ? static_cast<int>(P.t) : 0;
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
  const int end =
      (at.dense == 1 && S::keeps_sums ? 64 * S::tile : 0) + (S::splits_products ? S::jobs * 16 : 0);
  at.warp = (at.sequences + std::max(S::sequences * at.sequence, end) + 3) / 4 * 4;
  at.warps = std::clamp((kSharedBytes / 4 - at.warp0) / at.warp, 0, 4);
  at.floats = at.warp0 + at.warps * at.warp;
  return at;
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
