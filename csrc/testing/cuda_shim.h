// The part of CUDA's language and runtime that the kernels use, on the CPU, for tests; cuda_block.h runs the
// threads. A launch is synchronous. Each block has its own allocation of dynamic shared memory, of exactly
// the requested size and filled with NaN.
//
// After an error in a kernel, cudaGetLastError() returns cudaErrorLaunchFailure and cudaGetErrorString()
// describes it. Not emulated: weak memory order, streams, lost updates (ThreadSanitizer reports them), and
// register limits.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "testing/cuda_block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct CUstream_st*;

namespace fastlin {
namespace emulated {

constexpr std::size_t kMaxFibers = 512;  // ThreadSanitizer supports 8128 threads, and is slow with many

// The emulated device, which tests configure. `order` is the order of threads and of blocks.
struct Device {
  int count = 1, multiprocessors = 4, shared_bytes = 99 * 1024;  // as on sm_86, the least since sm_80
  unsigned order = 0;

  int default_shared_bytes() const { return std::min(shared_bytes, 48 * 1024); }  // without opt-in
};
inline Device device;

// State of the emulated runtime.
struct Log {
  std::mutex running;                         // one launch at a time
  std::map<const void*, int> shared_allowed;  // by kernel, after its opt-in
  std::string problem;                        // description of the last failed launch
  long long launches = 0;
  bool records = false;                         // whether launches are kept, to be repeated
  std::vector<std::function<void()>> recorded;  // since `records` was set
};
inline Log& log() {
  static Log instance;
  return instance;
}
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int current_device = 0;

inline cudaError_t failed(cudaError_t error) { return last_error = error; }

inline cudaError_t check_launch(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes) {
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  const auto allowed = log().shared_allowed.find(kernel);
  const int most = allowed == log().shared_allowed.end() ? device.default_shared_bytes() : allowed->second;
  return shared_bytes > static_cast<std::size_t>(most) ? cudaErrorInvalidValue : cudaSuccess;
}

inline std::vector<std::uint64_t> order_of_blocks(std::uint64_t count) {
  std::vector<std::uint64_t> order(count);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  if (device.order == 1) std::reverse(order.begin(), order.end());
  if (device.order > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(device.order));
  return order;
}

// Stacks and fibers, created once and reused. ThreadSanitizer must see blocks of a launch as unordered, so
// that it reports races between them: each block has its own fibers until kMaxFibers are in use. Reused
// fibers are ordered after everything before.
class FiberPool {
 public:
  const BlockFibers& for_block(std::size_t threads) {
    if (kFindsRaces && (used_ + 1) * threads > kMaxFibers) join();
    if (used_ == blocks_.size()) blocks_.emplace_back();
    std::unique_ptr<BlockFibers>& fibers = blocks_[used_];
    if (fibers == nullptr || fibers->tsan_fibers.size() < threads) {
      fibers.reset();
      fibers = std::make_unique<BlockFibers>(threads);
    }
    if (kFindsRaces) ++used_;
    return *fibers;
  }
  void join() {
    for (std::size_t i = 0; i < used_; ++i)
      emulated::join(blocks_[i]->tsan_fibers.data(), blocks_[i]->tsan_fibers.size());
    used_ = 0;
  }
  void abandon() { blocks_.clear(); }  // threads that have not returned still have frames on the stacks

 private:
  std::vector<std::unique_ptr<BlockFibers>> blocks_;
  std::size_t used_ = 0;
};

// Under ThreadSanitizer, shared memory lives until the end of the launch: blocks must not reuse addresses.
inline void run_grid(dim3 grid, dim3 block, std::size_t shared_bytes) {
  static FiberPool pool;
  const unsigned threads = block.x * block.y * block.z;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  running.block_size = {block.x, block.y, block.z};
  running.grid_size = {grid.x, grid.y, grid.z};
  std::string problem;
  for (std::uint64_t i : order_of_blocks(std::uint64_t{grid.x} * grid.y * grid.z)) {
    if (!kFindsRaces) memory.clear();
    memory.emplace_back(new unsigned char[shared_bytes]);
    running.shared_memory = memory.back().get();
    std::memset(running.shared_memory, 0xff, shared_bytes);
    running.block_index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                           static_cast<unsigned>(i / grid.x / grid.y)};
    const unsigned seed = device.order + static_cast<unsigned>(i);
    problem = Block(threads, device.order > 1 ? seed : device.order, pool.for_block(threads)).run();
    if (problem.empty()) continue;
    log().problem = "block " + std::to_string(i) + ": " + problem;
    failed(cudaErrorLaunchFailure);
    break;
  }
  pool.join();
  if (!problem.empty()) pool.abandon();
}

// Converts and copies the arguments once, like a launch.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t,
            Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "arguments are copied as bytes");
  static_assert(sizeof(std::tuple<Parameters...>) <= 4096, "CUDA's limit");
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  const std::lock_guard<std::mutex> lock(log().running);
  if (const cudaError_t error =
          check_launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes);
      error != cudaSuccess) {
    failed(error);
    return;
  }
  const auto run = [call, grid, block, shared_bytes] {
    running.body = [](const void* pointer) {
      const Call* launched = static_cast<const Call*>(pointer);
      std::apply(launched->kernel, launched->arguments);
    };
    running.arguments = &call;
    run_grid(grid, block, shared_bytes);
    ++log().launches;
  };
  if (log().records) log().recorded.emplace_back(run);
  run();
}

// Starts to keep launches, after those kept before are forgotten, or ends it; returns how many are kept.
inline long long record(bool records) {
  const std::lock_guard<std::mutex> lock(log().running);
  if (records && !log().records) log().recorded.clear();
  log().records = records;
  return static_cast<long long>(log().recorded.size());
}

// Repeats a launch that was kept, with the same arguments.
inline void repeat(long long number) {
  const std::lock_guard<std::mutex> lock(log().running);
  log().recorded.at(static_cast<std::size_t>(number))();
}

// The host, which also runs __host__ __device__ functions, is thread 0.
FASTLIN_UNWATCHED inline uint3 thread_index() {
  return running.thread == nullptr ? uint3{} : running.thread->index;
}
FASTLIN_UNWATCHED inline uint3 block_index() { return running.block_index; }
FASTLIN_UNWATCHED inline uint3 block_size() { return running.block_size; }
FASTLIN_UNWATCHED inline uint3 grid_size() { return running.grid_size; }
FASTLIN_UNWATCHED inline unsigned char* shared_memory() { return running.shared_memory; }
FASTLIN_UNWATCHED inline unsigned thread_number() {
  return static_cast<unsigned>(running.thread - running.threads);
}
FASTLIN_UNWATCHED inline unsigned lane_index() { return thread_number() % kLanes; }

template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* file, int line) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  Wait wait{Op::kShuffle, mask, source, 0, file, line};
  std::memcpy(&wait.value, &value, sizeof(T));
  const std::uint64_t received = wait_for(wait);
  std::memcpy(&value, &received, sizeof(T));
  return value;
}

}  // namespace emulated
}  // namespace fastlin

// Python tests configure the emulated device of a loaded library through these.
extern "C" {
__attribute__((used, visibility("default"))) inline void fastlin_emulate(int devices, int multiprocessors,
                                                                         int shared_bytes, unsigned order) {
  fastlin::emulated::device = {devices, multiprocessors, shared_bytes, order};
}
__attribute__((used, visibility("default"))) inline long long fastlin_emulated_launches() {
  return fastlin::emulated::log().launches;
}
__attribute__((used, visibility("default"))) inline long long fastlin_emulated_record(int records) {
  return fastlin::emulated::record(records != 0);
}
__attribute__((used, visibility("default"))) inline void fastlin_emulated_repeat(long long number) {
  fastlin::emulated::repeat(number);
}
}

#define threadIdx (::fastlin::emulated::thread_index())
#define blockIdx (::fastlin::emulated::block_index())
#define blockDim (::fastlin::emulated::block_size())
#define gridDim (::fastlin::emulated::grid_size())

// Default arguments that hold the place of the call.
#define FASTLIN_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(FASTLIN_HERE) {
  fastlin::emulated::wait_for({fastlin::emulated::Op::kBarrier, 0, 0, 0, file, line});
}
// Barrier `number` of `threads` threads, whole warps.
inline void sync_named(unsigned number, unsigned threads, FASTLIN_HERE) {
  fastlin::emulated::wait_for({fastlin::emulated::Op::kNamedBarrier, number, threads, 0, file, line});
}
inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes) {
  fastlin::emulated::copy_later(fastlin::emulated::thread_number(), to, from, static_cast<unsigned>(bytes));
}
inline void __pipeline_commit() { fastlin::emulated::commit_copies(fastlin::emulated::thread_number()); }
inline void __pipeline_wait_prior(unsigned groups) {
  fastlin::emulated::wait_for_copies(fastlin::emulated::thread_number(), groups);
}
inline void __syncwarp(unsigned mask = ~0u, FASTLIN_HERE) {
  fastlin::emulated::wait_for({fastlin::emulated::Op::kSyncWarp, mask, 0, 0, file, line});
}
inline unsigned __ballot_sync(unsigned mask, int vote, FASTLIN_HERE) {
  const std::uint64_t nonzero = vote != 0;
  return static_cast<unsigned>(
      fastlin::emulated::wait_for({fastlin::emulated::Op::kBallot, mask, 0, nonzero, file, line}));
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __any_sync(unsigned mask, int vote, FASTLIN_HERE) {
  return __ballot_sync(mask, vote, file, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, FASTLIN_HERE) {
  return __ballot_sync(mask, vote == 0, file, line) == 0;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Shuffles within groups of `width` lanes, a power of two; a source outside the group gives the lane its own
// value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, FASTLIN_HERE) {
  const unsigned lane = fastlin::emulated::lane_index(), inside = static_cast<unsigned>(width) - 1;
  return fastlin::emulated::shuffle(mask, value, (lane & ~inside) | (static_cast<unsigned>(source) & inside),
                                    file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, FASTLIN_HERE) {
  const unsigned lane = fastlin::emulated::lane_index(), inside = static_cast<unsigned>(width) - 1;
  return fastlin::emulated::shuffle(mask, value, (lane & inside) >= distance ? lane - distance : lane, file,
                                    line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, FASTLIN_HERE) {
  const unsigned lane = fastlin::emulated::lane_index(), inside = static_cast<unsigned>(width) - 1;
  return fastlin::emulated::shuffle(
      mask, value, (lane & inside) + distance <= inside ? lane + distance : lane, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FASTLIN_HERE) {
  const unsigned lane = fastlin::emulated::lane_index(), inside = static_cast<unsigned>(width) - 1;
  const unsigned source = lane ^ static_cast<unsigned>(bits);
  return fastlin::emulated::shuffle(mask, value, (source & ~inside) > (lane & ~inside) ? lane : source, file,
                                    line);
}

template <class T>
T atomicAdd(T* to, T value) {
  T old, sum;
  __atomic_load(to, &old, __ATOMIC_RELAXED);
  do {
    sum = old + value;
  } while (!__atomic_compare_exchange(to, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

inline cudaError_t cudaPeekAtLastError() { return fastlin::emulated::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(fastlin::emulated::last_error, cudaSuccess); }

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorLaunchFailure:
      return fastlin::emulated::log().problem.c_str();
  }
  return "unrecognized error code";
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = fastlin::emulated::device.count;
  return *count > 0 ? cudaSuccess : fastlin::emulated::failed(cudaErrorNoDevice);
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = fastlin::emulated::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= fastlin::emulated::device.count) {
    return fastlin::emulated::failed(cudaErrorInvalidDevice);
  }
  fastlin::emulated::current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= fastlin::emulated::device.count) {
    return fastlin::emulated::failed(cudaErrorInvalidDevice);
  }
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = fastlin::emulated::device.default_shared_bytes();
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = fastlin::emulated::device.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 6;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = fastlin::emulated::device.shared_bytes;
      return cudaSuccess;
  }
  return fastlin::emulated::failed(cudaErrorInvalidValue);
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || value > fastlin::emulated::device.shared_bytes) {
    return fastlin::emulated::failed(cudaErrorInvalidValue);
  }
  const std::lock_guard<std::mutex> lock(fastlin::emulated::log().running);
  fastlin::emulated::log().shared_allowed[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}
