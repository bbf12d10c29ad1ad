// The kernels on plain pointers: what bindings.cpp calls and the backends define. Arguments are validated
// above. Letters and shapes are those of fastlin/backends/problem.py; [..] arrays are contiguous.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/philox.h"

namespace fastlin {

// Draws of sequences offset, offset + 1, ... (mod 2^64) of one stream at one step, from a first block on;
// core/philox.h has the layout.
struct Draws {
  std::uint64_t seed;
  std::uint64_t offset;
  std::uint32_t block;   // with the columns that follow, at most kMaxBlocks
  std::uint32_t step;    // below kMaxSteps
  std::uint32_t stream;  // below kMaxStreams
};

// A task source and a place in it: which sequences there are. fastlin/data/sources.py has the meaning; null
// is absent. Weights have means and factors, one task has a mean alone, the sphere neither.
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
};

// A batch that is drawn.
template <class T>
struct Sample {
  T* x;                // Gram matrices [B, m, m] or tokens [B, n, m]
  T* q;                // [B, m]
  T* y;                // [B]
  std::int64_t* task;  // [B]
};

// What a call is given. A null pointer is an absent argument; layers counts matrix layers, L - 1.
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
  const Source* source;  // draws x, q, y and task in their place
  const std::int64_t*
      counts;          // [K] sequences of each task and their sum in the whole that this batch is a part
  std::int64_t total;  // of; null when it is the whole

  bool has_targets() const { return y != nullptr || source != nullptr; }
  // v [m] of head `vector` of all trials' heads, for task k.
  FASTLIN_HD const T* v_of(std::int64_t vector, std::int64_t k) const {
    return v + (shares_v ? vector : vector * K + k) * m;
  }
};

// What a call is asked for: null where it is not wanted.
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

// Asked every few tiles whether to stop; may be null. Called on the thread that made the call.
struct Interrupt {
  bool (*asked)(void*);
  void* state;
};

// One instruction set. What takes an Interrupt returns false when it was interrupted; a task index outside
// [0, K) makes `attention` throw std::out_of_range before it writes.
template <class T>
struct Kernels {
  int lanes;  // of a vector
  bool (*attention)(const Problem<T>&, const Results<T>&, int threads, Interrupt);
  bool (*gram)(const T* z, std::int64_t batch, std::int64_t row,  // [B, n, m] and its strides
               std::int64_t B, std::int64_t n, std::int64_t m, T* G, int threads, Interrupt);
  bool (*sample)(const Source&, std::int64_t B, bool is_gram, const Sample<T>&, int threads, Interrupt);
  bool (*sample_tasks)(const Source&, std::int64_t B, std::int64_t* task, int threads, Interrupt);  // [B]
  double (*fma_chains)(std::int64_t iterations);  // floating-point operations done
  // Row i is sequence offset + i. Column j is draw 4 block + j; of chi variates, slot j.
  void (*fill_uniform)(T* out,  // [rows, columns]
                       std::int64_t rows, std::int64_t columns, const Draws&, int threads);
  void (*fill_normal)(T* out,  // [rows, columns]
                      std::int64_t rows, std::int64_t columns, const Draws&, int threads);
  void (*fill_chi)(T* out, const std::int64_t* freedom,  // [rows, slots], [slots]
                   std::int64_t rows, std::int64_t slots, const Draws&, int threads);
  void (*box_muller)(const std::uint32_t* words, std::int64_t pairs, T* out);  // [pairs, 2] both
};

struct InstructionSet {
  const char* name;
  bool (*runs_here)();
  Kernels<float> single;
  Kernels<double> dbl;
};

// All that this build has, best first; the last one runs everywhere.
const std::vector<const InstructionSet*>& instruction_sets();

// How `attention` goes about a problem: "streamed", "gram", "stack", "sampled" or "sampled stack"; "gram
// trials" or "sampled trials" when trials lie in lanes, "streamed columns" when columns do.
template <class T>
std::string path_of(const Problem<T>& problem, const Results<T>& results, int lanes);

}  // namespace fastlin
