// Tests the emulation of CUDA on small kernels: what it must compute, and which faults it must report.
//
//   cuda_shim_driver correct   correct kernels, in several orders of threads      prints "ok <kernels>"
//   cuda_shim_driver <fault>   one kernel with that fault; prints the launch error, if no sanitizer stops it

#include <cstdio>
#include <string>
#include <vector>

#include "cuda/platform.h"

namespace fastlin {
namespace {

constexpr int kThreads = 96, kBlocks = 3;
constexpr unsigned kAll = ~0u;

enum Fault { kNone, kBarrier, kSyncWarp, kBound, kGlobalBound, kMask, kLeft, kBlocksShare };

__device__ __forceinline__ unsigned flat_index() { return threadIdx.y * blockDim.x + threadIdx.x; }

// Each block reverses its part of the numbers through shared memory.
__global__ void __launch_bounds__(kThreads) reversed(const double* from, double* to, Fault fault) {
  FASTLIN_SHARED_MEMORY(memory);
  double* const shared = reinterpret_cast<double*>(memory);
  const unsigned i = flat_index(), first = blockIdx.x * kThreads;
  shared[fault == kBound ? i + 1 : i] = from[fault == kGlobalBound ? first + i + 1 : first + i];
  if (fault != kBarrier) __syncthreads();
  to[first + i] = shared[kThreads - 1 - i];
  __syncthreads();
  // Reverses within each warp too, without a barrier of the block.
  const unsigned lane = i % 32, other = i - lane + 31 - lane;
  shared[i] = to[first + i];
  if (fault != kSyncWarp) __syncwarp();
  to[first + i] += shared[other];
}

// The sum of each warp in all of its lanes. The fault: a mask that lacks a lane that takes part.
__global__ void summed(const double* from, double* to, Fault fault) {
  const unsigned at = blockIdx.x * kThreads + flat_index();
  double sum = from[at];
  const unsigned mask = fault == kMask && threadIdx.x == 5 ? 0x0000ffdfu : kAll;
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(mask, sum, bits);
  to[at] = sum;
}

// A barrier that the first lane of each warp does not reach, or reaches at another line.
__global__ void divergent(double* to, Fault fault) {
  if (fault == kLeft && threadIdx.x == 0) return;
  if (fault == kBarrier && threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  to[blockIdx.x * kThreads + flat_index()] = 0;
}

// Two halves of a warp that diverge, each with its own mask; lane 3 has returned.
__global__ void halves(double* to) {
  const unsigned lane = threadIdx.x, at = blockIdx.x * kThreads + flat_index();
  if (lane == 3) return;
  const unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
  unsigned votes = 0;
  if (lane < 16) {
    votes = __ballot_sync(mask, lane % 2);
    __syncwarp(mask);
  } else {
    votes = __any_sync(mask, lane == 20) + 2 * __any_sync(mask, 0) + 4 * __all_sync(mask, 1) +
            8 * __all_sync(mask, lane != 20);
  }
  to[at] = votes + __shfl_sync(mask, lane, 1, 16) * 0x1p20 + __shfl_up_sync(mask, lane, 1, 8) * 0x1p30 +
           __shfl_down_sync(mask, lane, 2, 8) * 0x1p40;
}

// All blocks add to one number, atomically, or with the fault of a race.
__global__ void added(double* to, Fault fault) {
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  if (fault == kBlocksShare) {
    *to += 1;
  } else {
    atomicAdd(to, 1.0);
  }
}

struct Numbers {
  std::vector<double> from, to;
  Numbers() : from(kBlocks * kThreads), to(from.size(), -1) {
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<double>(i % 7 + i / 5);
  }
};

const dim3 kBlock(32, kThreads / 32);

std::string last_error_text() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

std::string reverse(Numbers& numbers, Fault fault) {
  FASTLIN_LAUNCH(reversed, kBlocks, kBlock, kThreads * sizeof(double), nullptr, numbers.from.data(),
                 numbers.to.data(), fault);
  return last_error_text();
}

bool reverses_correctly() {
  Numbers numbers;
  if (!reverse(numbers, kNone).empty()) return false;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int first = i - i % kThreads, lane = i % 32, other = i - lane + 31 - lane;
    const auto mirrored = [&](int j) { return numbers.from[first + kThreads - 1 - j % kThreads]; };
    if (numbers.to[i] != mirrored(i) + mirrored(other)) return false;
  }
  return true;
}

bool sums_correctly() {
  Numbers numbers;
  FASTLIN_LAUNCH(summed, kBlocks, kBlock, 0, nullptr, numbers.from.data(), numbers.to.data(), kNone);
  if (!last_error_text().empty()) return false;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    double sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += numbers.from[i - i % 32 + lane];
    if (numbers.to[i] != sum) return false;
  }
  return true;
}

bool halves_correctly() {
  Numbers numbers;
  FASTLIN_LAUNCH(halves, kBlocks, kBlock, 0, nullptr, numbers.to.data());
  if (!last_error_text().empty()) return false;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const unsigned lane = i % 32, up = lane % 8 == 0 ? lane : lane - 1, down = lane % 8 < 6 ? lane + 2 : lane;
    // A lane that has returned sends garbage.
    if (lane == 3 ? numbers.to[i] != -1 : up != 3 && down != 3) {
      const double votes = lane < 16 ? 0xaaa2 : 1 + 4;
      const double expected = votes + (lane / 16 * 16 + 1) * 0x1p20 + up * 0x1p30 + down * 0x1p40;
      if (lane == 3 || numbers.to[i] != expected) return false;
    }
  }
  return true;
}

bool adds_correctly() {
  double total = 0;
  FASTLIN_LAUNCH(added, 100, kBlock, 0, nullptr, &total, kNone);
  return last_error_text().empty() && total == 100;
}

// The runtime refuses bad launches, and the next launch works.
bool refuses() {
  const auto code = [](int grid, dim3 block, std::size_t bytes) {
    Numbers numbers;
    FASTLIN_LAUNCH(summed, grid, block, bytes, nullptr, numbers.from.data(), numbers.to.data(), kNone);
    return cudaGetLastError();
  };
  const auto allow = [](int bytes) {
    return cudaFuncSetAttribute(summed, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  int value = 0;
  const bool shared = code(1, kBlock, 48 * 1024) == 0 && code(1, kBlock, 48 * 1024 + 1) == 1 &&
                      allow(99 * 1024) == 0 && code(1, kBlock, 99 * 1024) == 0 &&
                      code(1, kBlock, 99 * 1024 + 1) == 1 && allow(48 * 1024) == 0 && allow(100 * 1024) == 1;
  const bool sizes = cudaGetLastError() == cudaErrorInvalidValue && code(0, kBlock, 0) == 9 &&
                     code(1, dim3(1025), 0) == 9 && code(1, dim3(0), 0) == 9;
  const bool devices = cudaSetDevice(1) == cudaErrorInvalidDevice && cudaSetDevice(0) == 0 &&
                       cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == 0 && value == 4 &&
                       cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1) == 101;
  return shared && sizes && devices && cudaGetLastError() == 101 && cudaGetLastError() == 0;
}

int correct() {
  int done = 0;
  for (unsigned order : {0u, 1u, 2u, 3u, 4u}) {
    emulated::device.order = order;
    for (bool (*check)() : {reverses_correctly, sums_correctly, halves_correctly, adds_correctly, refuses}) {
      if (!check()) {
        std::printf("check %d, order %u\n", done % 5, order);
        return 1;
      }
      ++done;
    }
  }
  std::printf("ok %d\n", done);
  return 0;
}

int faulty(const std::string& fault) {
  Numbers numbers;
  double total = 0;
  std::string text;
  if (fault == "barrier") text = reverse(numbers, kBarrier);
  if (fault == "syncwarp") text = reverse(numbers, kSyncWarp);
  if (fault == "shared-bound") text = reverse(numbers, kBound);
  if (fault == "global-bound") text = reverse(numbers, kGlobalBound);
  if (fault == "mask") {
    FASTLIN_LAUNCH(summed, kBlocks, kBlock, 0, nullptr, numbers.from.data(), numbers.to.data(), kMask);
    text = last_error_text();
  }
  if (fault == "left" || fault == "divergent") {
    FASTLIN_LAUNCH(divergent, kBlocks, kBlock, 0, nullptr, numbers.to.data(),
                   fault == "left" ? kLeft : kBarrier);
    text = last_error_text();
  }
  if (fault == "blocks") {
    FASTLIN_LAUNCH(added, kBlocks, kBlock, 0, nullptr, &total, kBlocksShare);
    text = last_error_text();
  }
  // A launch after a failed one works.
  const bool recovers = reverses_correctly();
  std::printf("%s\n", text.c_str());
  return recovers ? 0 : 1;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  const std::string mode = count == 2 ? arguments[1] : "";
  return mode == "correct" ? fastlin::correct() : fastlin::faulty(mode);
}
