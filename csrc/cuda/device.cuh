// What every CUDA source starts with: the language or its emulation, the macros of csrc/core, and how a
// kernel is launched.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "cuda/platform.h"

// The host lays out workspace with the code that the device finds it by.
#define FASTLIN_HD __host__ __device__
#define FASTLIN_INLINE __forceinline__
// FASTLIN_ROLL before a loop that the compiler would unroll, for 32 lanes or for a count that it does not
// know: with its addresses that takes more registers than there are.
#ifdef __CUDA_ARCH__
#define FASTLIN_UNROLL _Pragma("unroll")
#define FASTLIN_ROLL _Pragma("unroll 2")
#define FASTLIN_NO_UNROLL _Pragma("unroll 1")
#else
#define FASTLIN_UNROLL
#define FASTLIN_ROLL
#define FASTLIN_NO_UNROLL
#endif

#include "core/arena.h"
#include "cuda/family.h"

namespace fastlin {
namespace cuda {
namespace {

// An error that has been seen: CUDA would report it again after the next launch.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// What a device has.
struct Device {
  int processors = 1, shared_bytes = 48 << 10;  // multiprocessors; shared memory of a block

  explicit Device(int index) {
    taken(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index));
    taken(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  }
};

// Calls f with the compiled width that serves m, an integral constant.
template <std::size_t i = 0, class F>
auto with_width(std::int64_t m, const F& f) {
  if constexpr (i + 1 < std::size(kWidths)) {
    if (m > kWidths[i]) return with_width<i + 1>(m, f);
  }
  return f(std::integral_constant<int, kWidths[i]>{});
}

inline std::int64_t round_up(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Parts of a workspace, one after another; null addresses while bytes are counted.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class N>
  N* take(std::int64_t count) {
    N* memory = base_ == nullptr ? nullptr : reinterpret_cast<N*>(base_ + used_);
    used_ += round_up(count * static_cast<std::int64_t>(sizeof(N)));
    return memory;
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

// A kernel that uses more shared memory than every device has must say so. It says how much there is, not how
// much it uses: another thread may launch it with less in between.
template <class Kernel, class... Given>
int launch(Kernel kernel, dim3 grid, dim3 threads, std::size_t shared, void* stream, const Given&... given) {
  if (shared > (48u << 10)) {
    int current = 0;
    cudaGetDevice(&current);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   Device(current).shared_bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  FASTLIN_LAUNCH(kernel, grid, threads, shared, static_cast<cudaStream_t>(stream), given...);
  return static_cast<int>(cudaGetLastError());
}

// Sequences of task k in the batch, the same in all lanes of the warp that calls it.
__device__ inline double count_of(const Work& work, int k) {
  if (work.P.counts != nullptr) return static_cast<double>(work.P.counts[k]);
  if (work.counts == nullptr) return static_cast<double>(work.P.B);
  int sum = 0;
  const int rows = static_cast<int>(work.count_rows), K = static_cast<int>(work.P.K);
  FASTLIN_UNROLL
  for (int first = 0; first < kCountRows; first += 32) {
    const int row = first + static_cast<int>(threadIdx.x) % 32;
    if (row < rows) sum += work.counts[row * K + k];
  }
  FASTLIN_UNROLL
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
  return sum;
}

// Writes the coefficient of a squared error in the loss, of each task [K], to shared memory. All warps of a
// block call it; they must synchronise before they read.
__device__ inline void load_coefficients(const Work& work, float* coefficients, int warp, int warps) {
  FASTLIN_NO_UNROLL
  for (int k = warp; k < work.P.K; k += warps) {
    const double count = work.P.weight == nullptr ? 0.0 : count_of(work, k);
    const float coefficient = error_coefficient(work.P, k, count, work.total());
    if (threadIdx.x % 32 == 0) coefficients[k] = coefficient;
  }
}

// Task of sequence i of a call with given tasks.
__device__ inline int given_task(const Work& work, std::int64_t i) {
  return work.P.task == nullptr || work.P.K == 1 ? 0 : static_cast<int>(work.P.task[i]);
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
