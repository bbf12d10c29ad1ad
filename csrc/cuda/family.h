// What the fast kernels share: how a call is cut up, where its sums go, and what a record of a sequence is.
//
// They serve float32, one attention head, up to 8 tasks and widths up to 33, without gradients of the data;
// attention_kernel (generic.cu) serves the rest. A call is at most four launches:
//
//   form.cu, drawn.cu          tokens, stored or drawn sequences -> records, for trials.cu and stack.cu
//   one of                     partial sums of every chunk of sequences
//     trials.cu                one layer, from records or stored Gram matrices
//     tokens.cu                one layer, one trial, from tokens: no Gram matrix
//     drawn.cu                 one layer, one trial, drawn: no Gram matrix
//     stack.cu                 matrix layers, from records
//   finish.cu, reduce          the sums of all chunks, by a fixed tree
//   finish.cu, finish          results of each task, and the loss
//
// Chunks depend on the problem alone, so that a result has the same bits on every GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/records.h"
#include "cuda/launch.h"
#include "kernels.h"

namespace fastlin {
namespace cuda {

// Widths that are compiled. A call of width m is served by the least M >= m: entries beyond m are zero in
// records and in what a kernel loads of the parameters.
constexpr int kWidths[] = {6, 7, 11, 12, 21, 22, 33};
constexpr int kMostTasks = 8;
// Of dynamic shared memory for a block: what every GPU since sm_80 has, so that tiles are the same on all.
constexpr int kSharedBytes = 99 << 10;

constexpr int width_for(std::int64_t m) {
  for (const int M : kWidths) {
    if (m <= M) return M;
  }
  return 0;
}

// Floats of a record: the upper triangle of G, row after row, (i, j) with i <= j; q; y; the task as bits of
// an int. G is without prompt; with see_query it has q q'. An odd number of quads: lanes with records of
// their own meet in no bank.
template <int M>
struct RecordOf {
  static constexpr int triangle = M * (M + 1) / 2;
  static constexpr int q = (triangle + 3) / 4 * 4, y = q + M, task = y + 1;
  static constexpr int floats = ((task + 1 + 3) / 4 | 1) * 4;
};

inline int record_floats(int M) { return (((M * (M + 1) / 2 + 3) / 4 * 4 + M + 2 + 3) / 4 | 1) * 4; }

// Sums of a chunk, float32, one after another; those that are not wanted have no place:
//   dW [R, m, m]    sum of r q c'     without the factor `scale`
//   dA, dC [R, layers, m, m]          with it
//   sums [K, R, width]                columns of `Record`: squares; e = sum of r G a and q = sum of r q,
//                                     both without `scale`; p = dp of a stack
struct Numbers {
  std::int64_t dW = 0, dA = 0, dC = 0, sums = 0, count = 0;  // where each starts

  Numbers() = default;
  Numbers(const Problem<float>& P, const Results<float>& out, const Record& at) {
    const std::int64_t square = P.R * P.m * P.m;
    dA = out.dW != nullptr ? square : 0;
    dC = dA + (out.dA != nullptr ? P.layers * square : 0);
    sums = dC + (out.dC != nullptr ? P.layers * square : 0);
    count = sums + P.K * P.R * at.width;
  }
};

// A call as the fast kernels see it, an argument of each.
struct Work {
  Problem<float> P;  // its `source` is on the host: kernels read the one below
  Results<float> out;
  Source source;
  Record at;
  Numbers numbers;
  std::int64_t chunk;  // sequences of each chunk but the last, a multiple of 64
  std::int64_t chunks;
  float* partial;  // [chunks, numbers.count]
  int* counts;     // [count_rows, K] sequences of each task; null where K == 1
  std::int64_t count_rows;
  // Where the records of a piece of the batch lie: of sequences first, ..., first + records_count - 1.
  float* records;  // [records_count, record_floats]
  std::int64_t first, records_count;

  FASTLIN_HD bool gradients() const {
    return out.dW != nullptr || out.dv != nullptr || out.dp != nullptr || out.dA != nullptr ||
           out.dC != nullptr || out.dh != nullptr;
  }
  FASTLIN_HD double total() const { return static_cast<double>(P.counts != nullptr ? P.total : P.B); }
};

// Chunks of a batch: 64 sequences or more, and at most 512, which is four waves on the largest GPUs; fewer
// where the sums of all chunks would take more than 64 MB. They count all sums that could be asked for: a
// loss has the same bits with gradients and without.
inline std::int64_t chunk_of(const Problem<float>& P) {
  const std::int64_t numbers = P.R * (P.m * P.m * (1 + 2 * P.layers) + P.K * (1 + (2 + P.t) * P.m));
  const std::int64_t most =
      std::clamp<std::int64_t>((64 << 20) / (4 * std::max<std::int64_t>(numbers, 1)), 16, 512);
  const std::int64_t each = (P.B + most - 1) / most;
  return std::max<std::int64_t>((each + 63) / 64 * 64, 64);
}

// The kernels of a piece of the batch: each returns a cudaError_t. `first_chunk` and `chunks` of
// `Work::chunk` sequences are what a launch works on.
int launch_trials(const Work&, std::int64_t first_chunk, std::int64_t chunks, void* stream);
int launch_tokens(const Work&, std::int64_t first_chunk, std::int64_t chunks, void* stream);
int launch_drawn(const Work&, std::int64_t first_chunk, std::int64_t chunks, void* stream);
int launch_stack(const Work&, std::int64_t first_chunk, std::int64_t chunks, void* stream);

// Records of sequences first, ..., first + records_count - 1 of the call, from tokens, stored Gram matrices,
// or drawn. Block b also writes row b of `counts` if `counts_tasks`: kCountRows rows, zero where a block had
// none.
constexpr std::int64_t kCountRows = 512;
int launch_form(const Work&, bool counts_tasks, void* stream);        // tokens or stored matrices
int launch_form_drawn(const Work&, bool counts_tasks, void* stream);  // drawn
int launch_count(const Work&, void* stream);  // `counts` alone, of given or drawn tasks

int launch_finish(const Work&, double* sums, void* stream);  // reduce and finish; sums [K, R, width]

// Whether a family serves a call whose sizes fit; and whether its tile fits into shared memory.
bool trials_serve(const Problem<float>&, const Results<float>&);
bool tokens_serve(const Problem<float>&, const Results<float>&);
bool drawn_serves(const Problem<float>&, const Results<float>&, const Source&);
bool form_drawn_serves(const Source&);
bool stack_serves(const Problem<float>&, const Results<float>&);

}  // namespace cuda
}  // namespace fastlin
