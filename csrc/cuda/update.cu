// The optimiser update on a GPU: the arithmetic of core/update.h on all parameters of all trials, in two
// launches.
//
//   prepare   totals, trials that diverge, what the number of the update decides; where gradients are
//             clipped, the sum of squares of each chunk of a trial's gradient
//   apply     the update of every number; the first thread ends the update and the step
//
// A block has a chunk of a trial. What a launch writes no other block of it reads, and sums follow a fixed
// tree: the bits are the same in every run.
#include "cuda/device.cuh"
#include "cuda/on_device.h"
#include "cuda/update.h"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kChunk = 4 * kThreads;  // numbers: a trial of one layer has 165 at m = 11, K = 2

// What `prepare` writes for `apply`.
struct Prepared {
  UpdateCorrections corrections;
  double factor, average_weight;
  std::int64_t done;
};

template <class T>
struct Update {
  UpdateRule rule;
  UpdatedTrials<T> trials;
  UpdatedParameter<T> parameters[kMostParameters];
  Schedule schedule;
  std::int64_t width, chunks;  // of a trial
  Prepared* prepared;
  double* squares;  // [R, chunks]
};

// Calls f(parameter, i) for each number i of a parameter that this thread has in a chunk of a trial.
template <class T, class F>
__device__ void for_each_number(const Update<T>& update, std::int64_t chunk, F f) {
  const std::int64_t end = std::min((chunk + 1) * kChunk, update.width);
  for (std::int64_t at = chunk * kChunk + threadIdx.x; at < end; at += kThreads) {
    const UpdatedParameter<T>* p = update.parameters;
    std::int64_t i = at;
    for (; i >= p->size; ++p) i -= p->size;
    f(*p, i);
  }
}

// The gradient of number i of trial r.
template <class T>
__device__ T pulled(const UpdatedParameter<T>& p, std::int64_t r, std::int64_t i) {
  const std::int64_t in_run = p.copies == 1 ? 0 : i % p.run;
  const T* from = p.gradient + (r * p.size + i - in_run) * p.copies + in_run;
  T sum = from[0];
  FASTLIN_NO_UNROLL
  for (std::int64_t copy = 1; copy < p.copies; ++copy) sum += from[copy * p.run];
  return p.unit == nullptr ? sum : sum * p.unit[i];
}

// The sum over the threads of a block, in its first one.
__device__ double sum_of_block(double number) {
  FASTLIN_SHARED_MEMORY(shared);
  auto* sums = reinterpret_cast<double*>(shared);
  sums[threadIdx.x] = number;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[threadIdx.x];
}

// `chunks` blocks for each trial: those whose squares are wanted, else one.
template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ Update<T> update, std::int64_t chunks) {
  const UpdatedTrials<T>& trials = update.trials;
  const std::int64_t r = blockIdx.x / chunks, chunk = blockIdx.x % chunks, done = *trials.updates + 1;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const Schedule& schedule = update.schedule;
    *update.prepared = {UpdateCorrections(update.rule, static_cast<double>(done)), schedule.factor(),
                        schedule.average_weight(update.rule.average_weight), done};
  }
  if (r >= trials.R) return;
  if (chunk == 0 && threadIdx.x == 0) trials.note(r, done);
  if (update.rule.clip < 0.0) return;
  double square = 0.0;
  for_each_number(update, chunk, [&](const UpdatedParameter<T>& p, std::int64_t i) {
    const double g = p.trains(r) ? static_cast<double>(pulled(p, r, i)) : 0.0;
    square += g * g;
  });
  square = sum_of_block(square);
  if (threadIdx.x == 0) update.squares[r * chunks + chunk] = square;
}

template <class T>
__global__ void __launch_bounds__(kThreads) apply_kernel(const __grid_constant__ Update<T> update) {
  const UpdatedTrials<T>& trials = update.trials;
  const Prepared& now = *update.prepared;
  const std::int64_t r = blockIdx.x / update.chunks, chunk = blockIdx.x % update.chunks;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *trials.updates = now.done;
    update.schedule.go_on();
  }
  if (r >= trials.R || trials.diverged[r] != 0) return;
  double square = 0.0;
  FASTLIN_NO_UNROLL
  for (std::int64_t i = 0; update.rule.clip >= 0.0 && i < update.chunks; ++i) {
    square += update.squares[r * update.chunks + i];
  }
  const UpdateConstants<T> k(update.rule, now.corrections, trials.lr[r] * now.factor, square);
  const T weight = static_cast<T>(now.average_weight);
  for_each_number(update, chunk, [&](const UpdatedParameter<T>& p, std::int64_t i) {
    const std::int64_t at = r * p.size + i;
    if (p.trains(r)) {
      if (update.rule.is_adam) {
        adam(k, pulled(p, r, i), p.value[at], p.first[at], p.second[at]);
      } else {
        sgd(k, pulled(p, r, i), p.value[at], p.first[at]);
      }
    }
    if (weight > T(0) && p.average != nullptr) p.average[at] = averaged(weight, p.value[at], p.average[at]);
  });
}

std::int64_t chunks_of(std::int64_t width) {
  return std::max<std::int64_t>((width + kChunk - 1) / kChunk, 1);
}

unsigned blocks_of(std::int64_t R, std::int64_t chunks) {
  return static_cast<unsigned>(std::max<std::int64_t>(R * chunks, 1));
}

}  // namespace

std::int64_t update_bytes(std::int64_t R, std::int64_t width) {
  return static_cast<std::int64_t>(sizeof(Prepared)) +
         R * chunks_of(width) * static_cast<std::int64_t>(sizeof(double));
}

template <class T>
int update(const UpdateRule& rule, const UpdatedTrials<T>& trials,
           const std::vector<UpdatedParameter<T>>& parameters, const Schedule& schedule, void* workspace,
           int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  Update<T> all{rule, trials, {}, schedule, 0, 0, static_cast<Prepared*>(workspace), nullptr};
  std::copy(parameters.begin(), parameters.end(), all.parameters);
  for (const auto& p : parameters) all.width += p.size;
  all.chunks = chunks_of(all.width);
  all.squares = reinterpret_cast<double*>(all.prepared + 1);
  const std::int64_t chunks = rule.clip < 0.0 ? 1 : all.chunks;
  const auto on = static_cast<cudaStream_t>(stream);
  FASTLIN_LAUNCH(prepare_kernel<T>, dim3(blocks_of(trials.R, chunks)), dim3(kThreads),
                 kThreads * sizeof(double), on, all, chunks);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return static_cast<int>(error);
  FASTLIN_LAUNCH(apply_kernel<T>, dim3(blocks_of(trials.R, all.chunks)), dim3(kThreads), 0, on, all);
  return static_cast<int>(cudaGetLastError());
}

template int update(const UpdateRule&, const UpdatedTrials<float>&,
                    const std::vector<UpdatedParameter<float>>&, const Schedule&, void*, int, void*);
template int update(const UpdateRule&, const UpdatedTrials<double>&,
                    const std::vector<UpdatedParameter<double>>&, const Schedule&, void*, int, void*);

}  // namespace cuda
}  // namespace fastlin
