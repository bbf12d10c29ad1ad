// Shared memory of drawn.cu: a lane's column of draws, the groups that the factor's rows come in, and what is
// where in a block.
#pragma once

#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kLanes = 32, kMostWarps = 4, kStageStride = kLanes + 4;

// Entries of dW that a lane keeps, rows x columns: of those with which 32 lanes cover all of it, the tile
// with the fewest instructions, four multiply-adds an entry and a load of 128 bits for each row and column.
struct OuterTile {
  int rows, columns;
};
constexpr OuterTile outer_tile(int M) {
  OuterTile best{M, M};
  for (int i = 1; i <= M; ++i) {
    for (int j = 1; j <= M; ++j) {
      const bool covers = ((M - 2 + i) / i) * ((M - 1 + j) / j) <= kLanes;
      const int size = 4 * i * j + i + j;
      if (covers && size < 4 * best.rows * best.columns + best.rows + best.columns) best = {i, j};
    }
  }
  return best;
}

// A column of draws, and the groups of the factor's rows.
template <int M, bool kBias>
struct Column {
  static constexpr int d = M - 1 - kBias, quads = round_up(M, 4), d_quads = round_up(d, 4);
  static constexpr int normals_before(int row) { return (kBias ? d : 0) + row * d - row * (row + 1) / 2; }
  static constexpr int normals = normals_before(d);
  static constexpr int ring = normals < 64 ? round_up(normals, 8) : 64;
  // The first row that group `group` does not have.
  static constexpr int row_after(int group) {
    int row = 0;
    for (int g = 0; g <= group && row < d; ++g) {
      const int first = row == 0 ? 0 : normals_before(row);
      while (row < d && round_up(normals_before(row + 1), 8) - first <= ring) ++row;
    }
    return row;
  }
  static constexpr int count_groups() {
    int count = 1;
    while (row_after(count - 1) < d) ++count;
    return count;
  }
  static constexpr int groups = count_groups();
  static constexpr int query = 0, beta = round_up(d + 1, 4), chi = beta + d_quads;
  static constexpr int factor = chi + round_up(d + 1, 2), noise = factor + ring;
  static constexpr int after_noise = noise + round_up(d + 1, 4);

  static constexpr OuterTile tile = outer_tile(M);
  static constexpr int tile_rows = (M - 2 + tile.rows) / tile.rows;
  static constexpr int tile_columns = (M - 1 + tile.columns) / tile.columns;
  // Rows of the stage: squares, r e [M], r q [M], c [M and the tile's overhang], masks of tasks.
  static constexpr int of_e = 1, of_q = 1 + M, of_c = 1 + 2 * M,
                       of_masks = of_c + tile_columns * tile.columns;
  static_assert(tile_rows * tile.rows <= M + tile_columns * tile.columns, "rows of the tile reach beyond c");

  // Blocks of the table, at most.
  static constexpr int blocks = beta / 4 * 2 + d_quads / 4 + normals / 4 + 2 * groups + 2;
};

// Where a block's shared memory has what, in floats.
struct DrawnMemory {
  int task_stride, W, feature_factor, coefficients, group_ends, blocks, slots, warps;
  int scratch, stage_sums, each_warp, total_warps;  // of a warp
  std::size_t bytes() const {
    return sizeof(float) * static_cast<std::size_t>(warps + total_warps * each_warp);
  }
};

template <int M, bool kBias>
DrawnMemory drawn_memory(const Problem<float>& P, const Source& source) {
  using E = Column<M, kBias>;
  DrawnMemory at{};
  const int K = static_cast<int>(P.K), features = E::d * E::d_quads;
  const int of_task = 3 * E::quads + E::d_quads + (source.factors != nullptr ? features : 0);
  // Lanes of different tasks read 128 bits in different banks.
  at.task_stride = K == 1 ? of_task : round_up(of_task - 4, kLanes) + 4;
  at.W = K * at.task_stride;
  at.feature_factor = at.W + (M - 1) * E::quads;
  at.coefficients = at.feature_factor + (source.feature_factor != nullptr ? features : 0);
  at.group_ends = at.coefficients + round_up(K, 4);
  at.blocks = at.group_ends + round_up(E::groups, 4);
  at.slots = at.blocks + 4 * E::blocks;
  at.warps = at.slots + 8 * round_up(E::d + 1, 2);
  at.scratch = (source.noise_std != 0 ? E::after_noise : E::noise) * kLanes;
  const int draws = at.scratch + (source.feature_factor != nullptr ? E::d * kLanes : 0);
  const int stage = E::beta * kLanes + (E::of_masks + K) * kStageStride;
  at.stage_sums = round_up(draws > stage ? draws : stage, 4);
  // Columns of a record: squares, e, q.
  at.each_warp = round_up(at.stage_sums + K * (1 + 2 * M), 4);
  at.total_warps = 0;
  while (at.total_warps < kMostWarps &&
         sizeof(float) * (at.warps + (at.total_warps + 1) * at.each_warp) <= kSharedBytes) {
    ++at.total_warps;
  }
  return at;
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
