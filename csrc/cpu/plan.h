// How a problem is divided: the order of the sequences, blocks, chunks, and the sums for each task.
//
// Sequences run in the order of their tasks, so that the sums of a task are complete when the next one
// begins, or in memory order (lanes_are_columns_by_task-inl.h). README.md explains block, chunk and run. The
// sums of a task are a record of R rows of `Record::width` doubles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "core/records.h"
#include "kernels.h"

namespace fastlin {

enum class Path { kStreamed, kGram, kStack };

// Streaming tokens through c and e takes 4 n m multiply-adds for each of the R H vectors; forming G takes n
// m^2 / 2 once, and then 2 m^2 for each vector.
//
// Drawn sequences have a triangular factor of at most d + 2 rows (factor-inl.h). Streaming them takes 13 ns
// a sequence and vector, with its gradients; forming G takes 15 ns once, and then 5.5 ns for each vector (d =
// 10, AVX-512).
constexpr std::int64_t kFewVectors = 2;

template <class T>
Path choose_path(const Problem<T>& P) {
  if (P.layers > 0) return Path::kStack;
  if (P.source != nullptr) return P.R * P.H <= kFewVectors ? Path::kStreamed : Path::kGram;
  if (P.is_gram) return Path::kGram;
  const double vectors = static_cast<double>(P.R) * P.H;
  const double streamed = 4.0 * P.n * vectors, formed = 0.5 * P.n * (P.m + 1) + 2.0 * P.m * vectors;
  return P.R * P.H == 1 || streamed < formed ? Path::kStreamed : Path::kGram;
}

// How many trials lie in lanes (lanes_are_trials-inl.h): the first ones, unless gradients of the data are
// wanted, which are sums over trials. The trials that do not fill a vector have one if they are three
// quarters of it or more, and run with sequences in lanes otherwise. With 16 lanes and 16 more trials in all
// (two threads, B = 8192): 15 take 0.88 times as long in a vector, 12 the same, 9 take 1.02 times as long.
template <class T>
std::int64_t trials_in_lanes(const Problem<T>& P, const Results<T>& out, int lanes) {
  constexpr std::int64_t kFewest = 12;
  const bool wants_data_gradients = out.dx != nullptr || out.dq != nullptr;
  if (choose_path(P) != Path::kGram || wants_data_gradients || P.R < kFewest) return 0;
  const std::int64_t rest = P.R % lanes;
  return 4 * rest >= 3 * lanes ? P.R : P.R - rest;
}

constexpr std::int64_t kWidestColumns = 24;

// Whether a layer of one trial and one head runs with columns in lanes (lanes_are_columns-inl.h), four
// columns of each sequence.
template <class T>
bool has_columns_in_lanes(const Problem<T>& P, const Results<T>& out, int lanes) {
  const bool wants_data_gradients = out.dx != nullptr || out.dq != nullptr;
  return choose_path(P) == Path::kStreamed && P.source == nullptr && P.R * P.H == 1 &&
         !wants_data_gradients && lanes >= 4 && P.m >= 4 && P.m <= kWidestColumns;
}

// Sequences sorted by task: a stable counting sort.
class TaskOrder {
 public:
  std::vector<std::int64_t> order;  // empty if they are sorted already, or need not be
  std::vector<std::int64_t> start;  // [K + 1] position of each task in that order

  TaskOrder() = default;

  // From task [B], each in [0, K); null: all of task 0.
  TaskOrder(const std::int64_t* task, std::int64_t B, std::int64_t K, bool needs_order)
      : start(static_cast<std::size_t>(K) + 1, 0) {
    if (task == nullptr) {
      std::fill(start.begin() + 1, start.end(), B);
      return;
    }
    sort(task, B, K, needs_order);
  }

  std::int64_t sequence(std::int64_t position) const { return order.empty() ? position : order[position]; }
  std::int64_t count(std::int64_t k) const { return start[k + 1] - start[k]; }

 private:
  // Sorts four parts at the same time, each with its own counts: a count can be incremented only 5 cycles
  // after its last store, and four parts share that wait. With many tasks four sets of counts would not fit a
  // cache. An invalid task is counted at index K.
  void sort(const std::int64_t* task, std::int64_t B, std::int64_t K, bool needs_order) {
    constexpr std::int64_t kParts = 4;
    const std::int64_t parts = K <= 256 ? kParts : 1, each = B / parts;  // the last part has the rest
    std::vector<std::int64_t> next(static_cast<std::size_t>(parts * (K + 1)), 0);
    std::int64_t* counts[kParts];
    for (std::int64_t part = 0; part < kParts; ++part) counts[part] = next.data() + part % parts * (K + 1);
    const auto for_each = [&](auto f) {
      for (std::int64_t i = 0; parts > 1 && i < each; ++i) {
        f(counts[0], i), f(counts[1], i + each), f(counts[2], i + 2 * each), f(counts[3], i + 3 * each);
      }
      for (std::int64_t i = parts > 1 ? parts * each : 0; i < B; ++i) f(counts[kParts - 1], i);
    };
    std::uint64_t falls = 0;  // top bit: whether a task is below the one before
    for_each([&](std::int64_t* count, std::int64_t i) {
      ++count[std::min(static_cast<std::uint64_t>(task[i]), static_cast<std::uint64_t>(K))];
      falls |= static_cast<std::uint64_t>(task[i]) - static_cast<std::uint64_t>(task[i - (i > 0 ? 1 : 0)]);
    });
    std::int64_t first = 0;
    for (std::int64_t k = 0; k < K; ++k) {
      start[k] = first;
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t count = counts[part][k];
        counts[part][k] = first;
        first += count;
      }
    }
    if (first != B) throw std::out_of_range("a task index is outside [0, K)");
    start[K] = B;
    if (falls >> 63 == 0 || !needs_order) return;
    order.resize(static_cast<std::size_t>(B));
    for_each([&](std::int64_t* position, std::int64_t i) { order[position[task[i]]++] = i; });
  }
};

template <class T>
struct Plan {
  // As many as a large machine has threads, from batches of 32768 on. Smaller blocks than a chunk would make
  // more of smaller batches, but their sums cost 10 % at 50 trials of 8192 sequences in blocks of 64.
  static constexpr std::int64_t kBlocks = 128;
  static constexpr std::int64_t kPartialBytes = 24 << 20;  // for the sums of all blocks
  static constexpr std::int64_t kFewestBlocks = 8;
  // Sequences whose dW, and whose sums if there are very few tasks, are added in T before they are added in
  // double.
  static constexpr std::int64_t kChunk = 256;

  static constexpr double kWorthSharing = 1e6;  // multiply-adds, 20 us at 100 GFLOP/s
  static constexpr std::int64_t kTrials = 6;    // trials that use a Gram matrix while it is in L1
  // 31 KiB of Gram matrices at m = 11; with 2, 4 trials take 1.03 times as long.
  static constexpr std::int64_t kTilesInL1 = 4;

  const Problem<T>& problem;
  Path path;
  std::int64_t lane_trials;  // the first trials, which lie in lanes
  bool in_columns;           // whether columns lie in lanes
  Record record;
  TaskOrder by_task;           // without an order if in_columns
  std::vector<T> coefficient;  // [K] of a task's squared errors in the loss
  std::int64_t matrices;       // size of the sums over all tasks: dW, dA, dC
  std::int64_t block_size = 0, blocks = 0, tiles = 1;
  std::int64_t trials_at_once = 1, tiles_at_once = 1;
  // Columns in lanes: quads of the sums of a sequence, and whether each block keeps sums of all tasks.
  // Otherwise: numbers in the record of a sequence, a multiple of 8, and sequences of each block in a pass.
  std::int64_t quads_of_sums = 0;
  bool sums_by_block = true;
  std::int64_t padded_width = 0, sequences_at_once = 0;

  Plan(const Problem<T>& P, const Results<T>& out, int lanes)
      : problem(P),
        path(choose_path(P)),
        lane_trials(trials_in_lanes(P, out, lanes)),
        in_columns(has_columns_in_lanes(P, out, lanes)),
        record(P, out, in_columns) {
    const std::int64_t square = P.R * P.H * P.m * P.m;
    matrices = (out.dW != nullptr ? square : 0) +
               P.layers * square * ((out.dA != nullptr ? 1 : 0) + (out.dC != nullptr ? 1 : 0));
    const std::int64_t partial =
        (matrices + 2 * P.R * record.width) * static_cast<std::int64_t>(sizeof(double));
    const std::int64_t most =
        std::clamp(kPartialBytes / std::max<std::int64_t>(partial, 1), kFewestBlocks, kBlocks);
    // A small batch with much work is divided too; little work is not worth a second thread. In one layer the
    // sums of a block cost as much as a tile, so that a block has at least four tiles.
    const std::int64_t fewest = path == Path::kStack ? lanes : 4 * lanes;
    const std::int64_t shared = work() < kWorthSharing ? kChunk : std::clamp(P.B / 8, fewest, kChunk);
    block_size = std::max(shared, (P.B + most - 1) / most);
    tiles = kChunk / lanes;
    block_size = (block_size + lanes - 1) / lanes * lanes;
    blocks = (P.B + block_size - 1) / block_size;
    if (path != Path::kStack) {
      trials_at_once = std::min(kTrials, P.R - lane_trials);
      // The sampler keeps one factor at a time.
      tiles_at_once = path == Path::kStreamed && P.source != nullptr ? 1 : kTilesInL1;
    }
    if (path != Path::kStreamed) {
      // The Gram matrices of a chunk fit the second-level cache.
      const std::int64_t tile = P.m * P.m * lanes * static_cast<std::int64_t>(sizeof(T));
      tiles = std::clamp<std::int64_t>((192 << 10) / tile, 1, tiles);
    }
    if (in_columns) plan_columns(lanes / 4);
    by_task = TaskOrder(P.task, P.B, P.K, !in_columns);
    set_coefficients();
  }

  // Approximate multiply-adds of the call, as if all gradients were wanted.
  double work() const {
    const Problem<T>& P = problem;
    const double m = static_cast<double>(P.m), vectors = static_cast<double>(P.R) * P.H;
    // A drawn sequence takes as long as 40 m^2 multiply-adds: 35 ns at m = 11 and 290 GFLOP/s.
    const double context =
        P.source != nullptr ? 40.0 * m * m : P.n * m * (path == Path::kStreamed ? 4.0 * vectors : 0.5 * m);
    return P.B * (context + vectors * m * m * (4.0 + 10.0 * m * P.layers));
  }

  // Sequences of a task, and of all tasks, in the whole batch that this one is a part of.
  double count(std::int64_t k) const {
    return static_cast<double>(problem.counts != nullptr ? problem.counts[k] : by_task.count(k));
  }
  double total() const { return static_cast<double>(problem.counts != nullptr ? problem.total : problem.B); }

  // The task of the sequence at a position in the order of tasks.
  std::int64_t task(std::int64_t position) const {
    return std::upper_bound(by_task.start.begin(), by_task.start.end(), position) - by_task.start.begin() - 1;
  }

 private:
  static constexpr std::int64_t kRecordBytes = 2
                                               << 20;  // records of sequences, so that they stay in the cache
  static constexpr std::int64_t kSumsBytes = 8 << 20;  // sums of all tasks in all blocks

  // A group has `rows` sequences.
  void plan_columns(std::int64_t rows) {
    const Problem<T>& P = problem;
    const std::int64_t vectors = (record.e >= 0 ? 1 : 0) + (record.a >= 0 ? 1 : 0) + (record.q >= 0 ? 1 : 0);
    quads_of_sums = 1 + vectors * ((P.m + 3) / 4);
    // Blocks keep sums of all tasks if a task has at least eight sequences in a block on average; a small
    // batch counts as 2048.
    const std::int64_t bytes_of_sums = 4 * quads_of_sums * static_cast<std::int64_t>(sizeof(double));
    const std::int64_t divisor = std::max<std::int64_t>(blocks, 1);  // an empty batch has no block
    sums_by_block = P.K <= std::min(std::max<std::int64_t>(P.B, 2048) / (8 * divisor),
                                    kSumsBytes / (divisor * bytes_of_sums));
    // Records are whole pairs of quads. If a pass does not hold whole blocks, its part of a block is a
    // multiple of a chunk, or of four groups if not even a chunk fits.
    padded_width = (record.width + 7) / 8 * 8;
    const std::int64_t bytes = std::max<std::int64_t>(padded_width, 1) * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t fit = kRecordBytes / (bytes * divisor);
    const std::int64_t whole = fit >= kChunk ? kChunk : 4 * rows;
    sequences_at_once = std::min(block_size, std::max(fit / whole * whole, whole));
  }

  void set_coefficients() {
    if (!problem.has_targets()) return;
    coefficient.resize(static_cast<std::size_t>(problem.K));
    for (std::int64_t k = 0; k < problem.K; ++k) {
      coefficient[k] = error_coefficient(problem, k, count(k), total());
    }
  }
};

}  // namespace fastlin
