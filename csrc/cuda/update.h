// The launcher of the optimiser update, on plain pointers to device memory; like those of launch.h it
// enqueues and returns a cudaError_t.
#pragma once

#include <cstdint>
#include <vector>

#include "core/update.h"

namespace fastlin {
namespace cuda {

constexpr int kMostParameters = 16;  // they are an argument of the kernels

// What changes from step to step, in device memory: words of 8 bytes
//   row of this step (a double)     row of this step [width], a copy     rows [rows, width]
// A row has the step (an int64), the factor of the learning rates, the weight of the new values in the
// averages (doubles), and what else a step reads.
struct Schedule {
  double* words;  // null: no schedule
  std::int64_t rows, width;
  bool ends;  // whether the update is the last one of a step: it averages, and goes on to the next row

  static constexpr std::int64_t kFewestColumns = 3;
  FASTLIN_HD double factor() const { return words == nullptr ? 1.0 : words[2]; }
  FASTLIN_HD double average_weight(double given) const {
    return words == nullptr ? given : ends ? words[3] : 0.0;
  }
  FASTLIN_HD void go_on() const {
    if (words == nullptr || !ends) return;
    const double next = ++words[0];
    if (next >= static_cast<double>(rows)) return;
    const double* row = words + 1 + (static_cast<std::int64_t>(next) + 1) * width;
    for (std::int64_t i = 0; i < width; ++i) words[1 + i] = row[i];
  }
};

// Bytes of device memory that `update` works in; `width` counts the numbers of a trial.
std::int64_t update_bytes(std::int64_t R, std::int64_t width);

// As on a CPU, to rounding: norms are added in another order. The bits are the same on every GPU.
template <class T>
int update(const UpdateRule& rule, const UpdatedTrials<T>& trials,
           const std::vector<UpdatedParameter<T>>& parameters, const Schedule& schedule, void* workspace,
           int device, void* stream);

}  // namespace cuda
}  // namespace fastlin
