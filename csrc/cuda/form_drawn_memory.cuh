// Shared memory of form_drawn.cu: the sizes of a tile, a sequence's column of entries, and what is where in a
// block.
#pragma once

#include "cuda/draw.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M, bool kBias>
struct FormShape {
  static constexpr int d = M - 1 - kBias, d_quads = round_up(d, 4);
  static constexpr int tile = M <= 12 ? 32 : M <= 22 ? 16 : 8, threads = M <= 12 ? 128 : 256;
  static constexpr int workers = threads / tile, split = 32 / tile;  // workers; those of a warp
  static constexpr int band = M <= 12 ? 2 : 4, bands = (d + band - 1) / band;
  static constexpr int floats = RecordOf<M>::floats;
  // Entries of a column. `made` has q and the rows with a feature factor.
  static constexpr int query = 0, normals_of_beta = round_up(d + 1, 4), beta = normals_of_beta + d_quads;
  static constexpr int chi = beta + d, labels = chi + d + 1, noise = labels + d + 1;
  static constexpr int factor = noise + round_up(d + 1, 4);
  static constexpr int made = factor + round_up((kBias ? d : 0) + d * (d - 1) / 2, 4) + d;
  static constexpr int blocks = round_up(normals_of_beta / 4 * 2 + d_quads / 4 + (made - factor) / 4 + 2, 2);
};

// Where a block's shared memory has what, in floats.
struct FormMemory {
  int task_stride, feature_factor, blocks, slots, tasks, counts, columns, records, floats;
  std::size_t bytes() const { return sizeof(float) * static_cast<std::size_t>(floats); }
};

template <int M, bool kBias>
FormMemory form_memory(const Source& source) {
  using E = FormShape<M, kBias>;
  FormMemory at{};
  const int K = static_cast<int>(source.K), features = E::d * E::d_quads;
  const int of_task = E::d_quads + (source.factors != nullptr ? features : 0);
  // Lanes of different tasks read 128 bits in different banks.
  at.task_stride = K == 1 ? of_task : round_up(of_task - 4, 32) + 4;
  at.feature_factor = source.means != nullptr ? K * at.task_stride : 0;
  at.blocks = at.feature_factor + (source.feature_factor != nullptr ? features : 0);
  at.slots = at.blocks + 4 * E::blocks;
  at.tasks = at.slots + 8 * round_up(E::d + 1, 2);
  at.counts = at.tasks + E::tile;
  at.columns = at.counts + round_up(K, 4);
  const int entries = E::made + (source.feature_factor != nullptr ? E::d * (E::d + 1 + kBias) : 0);
  at.records = at.columns + entries * E::tile;
  at.floats = at.records + E::tile * E::floats;
  return at;
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
