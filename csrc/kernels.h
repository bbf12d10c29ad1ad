// The kernels on plain pointers: csrc/cpu defines them, bindings.cpp checks their arguments and calls them.
// Letters and shapes are those of fastlin/backends/problem.py; arrays are contiguous.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/philox.h"

namespace fastlin {

// Which draws: those of sequences offset, offset + 1, ... (mod 2^64) of one stream at one step, starting at a
// block. core/philox.h has the layout.
struct Draws {
  std::uint64_t seed;
  std::uint64_t offset;
  std::uint32_t block;   // the last block used is below kMaxBlocks
  std::uint32_t step;    // below kMaxSteps
  std::uint32_t stream;  // below kMaxStreams
};

// A task source, and the counter that selects its sequences. fastlin/data/sources.py defines the sources; a
// null pointer is absent. A mixture has means and factors, a fixed task has only a mean, the sphere has
// neither.
struct Source {
  std::int64_t d, n, K;        // features, tokens, tasks
  bool bias;                   // tokens start with a constant one: m = d + 2, else d + 1
  const double* means;         // [K, d]
  const double* factors;       // [K, d, d]
  const double* cumulative;    // [K] sums of the tasks' probabilities
  const std::int64_t* strata;  // [period] tasks in exact shares
  std::int64_t period;
  const double* feature_factor;  // [d, d]
  double radius, noise_std;
  std::uint64_t seed, offset;
  std::uint32_t step, stream;
  // Where a GPU finds the step when a kernel runs, so that its launch can be replayed; null: `step`. Kernels
  // ask current_step (core/philox-inl.h). A CPU never reads it.
  const std::int64_t* device_step;
};

// Where a drawn batch goes.
template <class T>
struct Sample {
  T* x;                // Gram matrices [B, m, m] or tokens [B, n, m]
  T* q;                // [B, m]
  T* y;                // [B]
  std::int64_t* task;  // [B]
};

// The inputs of a call. A null pointer is an absent argument; `layers` counts matrix layers, L - 1.
template <class T>
struct Problem {
  std::int64_t B, n, m, K, t, R, H, layers;
  const T* x;                   // tokens [B, n, m], or Gram matrices [B, m, m]
  std::int64_t x_batch, x_row;  // its strides; the last one is 1
  const T* q;                   // [B, m]
  std::int64_t q_batch;         // its stride; the last one is 1
  const std::int64_t* task;     // [B]; null is one task
  const T* p;                   // [R, K, t, m]
  const T* A;                   // [R, L - 1, H, m, m]
  const T* C;                   // [R, L - 1, H, m, m]
  const T* W;                   // [R, H, m, m]
  const T* v;                   // [R, H, K, m]; [R, H, m] when the tasks share it
  const T* h;                   // [R, K, m]; with last_skip
  const T* y;                   // [B]: squared errors, with weight [K] or the mean over the batch
  const T* weight;              // [K]
  const T* gy;                  // [R, B]: the reverse mode of the predictions
  double scale, first_skip, skip, last_skip;
  bool is_gram, see_query, shares_v;
  const Source* source;  // draws x, q, y and task, which are then absent
  // [K] sequences of each task, and their sum, in the whole batch that this one is a part of; null: all of
  // it.
  const std::int64_t* counts;
  std::int64_t total;

  FASTLIN_HD bool has_targets() const { return y != nullptr || source != nullptr; }
  // v [m] for task k; `vector` counts the heads of all trials.
  FASTLIN_HD const T* v_of(std::int64_t vector, std::int64_t k) const {
    return v + (shares_v ? vector : vector * K + k) * m;
  }
};

// The outputs of a call; null where a result is not wanted.
template <class T>
struct Results {
  T* yhat;      // [R, B]
  T* loss;      // [R]
  T* per_task;  // [R, K]
  T* dx;        // as x, contiguous
  T* dq;        // [B, m]
  T* dp;        // [R, K, t, m]
  T* dA;        // [R, L - 1, H, m, m]
  T* dC;        // [R, L - 1, H, m, m]
  T* dW;        // [R, H, m, m]
  T* dv;        // as v
  T* dh;        // [R, K, m]
};

// Kernels poll should_stop(state) every few tiles, on the thread that made the call; it may be null.
struct Interrupt {
  bool (*should_stop)(void*);
  void* state;
};

// The kernels of an instruction set. One that takes an Interrupt returns false when it was interrupted.
// `attention` throws std::out_of_range, before it writes, if a task index is outside [0, K).
template <class T>
struct Kernels {
  int lanes;  // of a vector
  bool (*attention)(const Problem<T>&, const Results<T>&, int threads, Interrupt);
  bool (*gram)(const T* z, std::int64_t batch, std::int64_t row,  // [B, n, m] and its strides
               std::int64_t B, std::int64_t n, std::int64_t m, T* G, int threads, Interrupt);
  bool (*sample)(const Source&, std::int64_t B, bool is_gram, const Sample<T>&, int threads, Interrupt);
  bool (*sample_tasks)(const Source&, std::int64_t B, std::int64_t* task, int threads, Interrupt);  // [B]
  double (*fma_chains)(std::int64_t iterations);  // returns the floating-point operations done
  // Row i is sequence offset + i. Column j is draw 4 block + j; of chi variates, slot j.
  void (*fill_uniform)(T* out,  // [rows, columns]
                       std::int64_t rows, std::int64_t columns, const Draws&, int threads);
  void (*fill_normal)(T* out,  // [rows, columns]
                      std::int64_t rows, std::int64_t columns, const Draws&, int threads);
  void (*fill_chi)(T* out, const std::int64_t* freedom,  // [rows, slots], [slots]
                   std::int64_t rows, std::int64_t slots, const Draws&, int threads);
  void (*box_muller)(const std::uint32_t* words, std::int64_t pairs, T* out);  // both [pairs, 2]
};

struct InstructionSet {
  const char* name;
  bool (*runs_here)();
  Kernels<float> single;
  Kernels<double> dbl;
};

template <class T>
const Kernels<T>& kernels_of(const InstructionSet& set) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return set.single;
  } else {
    return set.dbl;
  }
}

// The instruction sets of this build, best first; the last one runs everywhere.
const std::vector<const InstructionSet*>& instruction_sets();

// The path that `attention` takes: "streamed", "gram", "stack", "sampled" or "sampled stack"; "gram
// trials" or "sampled trials" when trials lie in lanes, "streamed columns" when columns do.
template <class T>
std::string path_of(const Problem<T>& problem, const Results<T>& results, int lanes);

}  // namespace fastlin
