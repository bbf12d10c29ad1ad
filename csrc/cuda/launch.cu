// The launchers: how a call is cut up, where its workspace lies, and which kernels run one after another.
#include <algorithm>

#include "cuda/kernels.cuh"
#include "cuda/launch.h"
#include "cuda/on_device.h"

namespace fastlin {
namespace cuda {
namespace {

constexpr std::int64_t kBlocks = 1024;            // of sequences: more than any GPU has room for at once
constexpr std::int64_t kPartialBytes = 64 << 20;  // for the sums of all blocks
constexpr std::int64_t kFewestBlocks = 32;
constexpr std::int64_t kScratchBytes = std::int64_t{1}
                                       << 29;  // of workspace that does not fit into shared memory
constexpr unsigned kThreads = 256;             // of kernels that do not work by warps

// An error that has been seen: CUDA would report it again after the next launch.
cudaError_t taken(cudaError_t error) {
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

// Where a kernel's workspace lies, and how many blocks of threads there are.
struct Shape {
  unsigned grid = 1, warps = 1;
  std::int64_t bytes = 0;  // of a block of threads
  bool is_shared = true;

  std::int64_t scratch_bytes() const { return is_shared ? 0 : bytes * grid; }
  std::size_t shared_bytes() const { return is_shared ? static_cast<std::size_t>(bytes) : 0; }
};

// `bytes` are those of a block; in shared memory when it has so many. Twice as many blocks as fit keep every
// multiprocessor busy until the end; in global memory a block more than there are multiprocessors is a waste
// of it.
Shape shape_of(const Device& device, std::int64_t bytes, unsigned warps, std::int64_t most) {
  Shape shape;
  shape.warps = warps;
  shape.bytes = bytes;
  shape.is_shared = bytes <= device.shared_bytes;
  std::int64_t grid = most;
  if (shape.is_shared) {
    grid = std::min<std::int64_t>(grid, std::int64_t{16} * device.processors);
  } else {
    grid = std::min(
        {grid, std::int64_t{2} * device.processors, std::max<std::int64_t>(kScratchBytes / bytes, 1)});
  }
  shape.grid = static_cast<unsigned>(std::max<std::int64_t>(grid, 1));
  return shape;
}

// A kernel that uses more shared memory than every device has must say so. It says how much there is, not how
// much it uses: another thread may launch it with less in between.
template <class Kernel, class... Given>
int launch(Kernel kernel, unsigned grid, dim3 threads, std::size_t shared, void* stream,
           const Given&... given) {
  if (shared > (48u << 10)) {
    int current = 0;
    cudaGetDevice(&current);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   Device(current).shared_bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  FASTLIN_LAUNCH(kernel, dim3(grid), threads, shared, static_cast<cudaStream_t>(stream), given...);
  return static_cast<int>(cudaGetLastError());
}

unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

std::int64_t round_up(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

// A call without addresses of workspace, and the shape of its main kernel.
template <class T>
struct Prepared {
  Call<T> call;
  Shape shape;
  std::int64_t partial, ends, records;  // bytes

  Prepared(const Problem<T>& P, const Results<T>& out, const Order& order, const Device& device)
      : call{P,
             out,
             order,
             P.source != nullptr ? *P.source : Source{},
             Record(P, out),
             0,
             0,
             0,
             nullptr,
             nullptr,
             nullptr,
             nullptr,
             0,
             0,
             0} {
    const std::int64_t square = P.R * P.H * P.m * P.m, tiles = (P.B + kLanes - 1) / kLanes;
    call.matrices = (out.dW != nullptr ? square : 0) +
                    P.layers * square * ((out.dA != nullptr ? 1 : 0) + (out.dC != nullptr ? 1 : 0));
    const std::int64_t number = static_cast<std::int64_t>(sizeof(double)),
                       record = P.R * call.at.width * number;
    // Sums of all that could be asked for: a loss has the same bits with gradients and without.
    const std::int64_t vectors = P.R * (1 + (P.H + P.t + 1) * P.m);
    const std::int64_t each = (square * (1 + 2 * P.layers) + 2 * vectors) * number;
    const std::int64_t most =
        std::clamp(kPartialBytes / std::max<std::int64_t>(each, 1), kFewestBlocks, kBlocks);
    const std::int64_t in_block = std::max<std::int64_t>((tiles + most - 1) / most, 1);
    call.block_size = in_block * kLanes;
    call.blocks = (tiles + in_block - 1) / in_block;
    partial = round_up(call.blocks * call.matrices * number);
    ends = round_up(call.blocks * 2 * record);
    records = round_up(P.K * record);
    const bool drawn = P.source != nullptr, stack = P.layers > 0;
    unsigned warps = static_cast<unsigned>(std::clamp<std::int64_t>(P.R, 1, kWarps));
    if (!drawn && !stack && !P.is_gram) warps = kWarps;  // tokens keep all of them busy
    if (call.of_data()) warps = 1;                       // sums over trials have one order
    std::int64_t bytes = measure(drawn, stack, warps);
    while (bytes > device.shared_bytes && warps > 1 && measure(drawn, stack, 1) <= device.shared_bytes) {
      warps /= 2;
      bytes = measure(drawn, stack, warps);
    }
    shape = shape_of(device, bytes, warps, call.blocks);
    call.scratch_bytes = bytes;
  }

  std::int64_t workspace() const { return partial + ends + records + shape.scratch_bytes(); }

  void place(void* workspace) {
    auto* at = static_cast<std::byte*>(workspace);
    call.partial = reinterpret_cast<double*>(at);
    call.ends = reinterpret_cast<double*>(at + partial);
    call.records = reinterpret_cast<double*>(at + partial + ends);
    call.scratch = shape.is_shared ? nullptr : at + partial + ends + records;
  }

 private:
  // Bytes of a block of threads. What forms the Gram matrices lies where the trials lie afterwards.
  std::int64_t measure(bool drawn, bool stack, unsigned warps) {
    Arena context, forming, trial;
    Context<T>(context, call);
    if (drawn) {
      Sampler<T>(forming, call.source);
    } else {
      Forming<T, false>(forming, call, 0, static_cast<int>(warps));
    }
    if (stack) {
      Trial<T, true>(trial, call);
    } else {
      Trial<T, false>(trial, call);
    }
    call.context_bytes = static_cast<std::int64_t>(context.used());
    call.trial_bytes = static_cast<std::int64_t>(trial.used());
    return call.context_bytes +
           std::max<std::int64_t>(static_cast<std::int64_t>(forming.used()), call.trial_bytes * warps);
  }
};

template <class T>
int run(const Prepared<T>& made, void* stream) {
  const Call<T>& call = made.call;
  const bool drawn = call.P.source != nullptr, stack = call.P.layers > 0;
  const auto kernel = stack ? (drawn ? attention_kernel<T, true, true> : attention_kernel<T, true, false>)
                            : (drawn ? attention_kernel<T, false, true> : attention_kernel<T, false, false>);
  int error = 0;
  if (call.blocks > 0) {
    error = launch(kernel, made.shape.grid, dim3(kLanes, made.shape.warps), made.shape.shared_bytes(), stream,
                   call);
  }
  if (error == 0 && call.matrices > 0) {
    error = launch(matrices_kernel<T>, blocks_of(call.matrices), dim3(kThreads), 0, stream, call);
  }
  if (error == 0 && (call.at.width > 0 || call.out.per_task != nullptr)) {
    const auto shared = static_cast<std::size_t>(call.P.m) * sizeof(double);
    const auto grid = static_cast<unsigned>(std::min<std::int64_t>(call.P.K * call.P.R, 1 << 30));
    error = launch(tasks_kernel<T>, grid, dim3(kLanes), shared, stream, call);
  }
  if (error == 0 && call.out.loss != nullptr) {
    error = launch(loss_kernel<T>, blocks_of(call.P.R), dim3(kThreads), 0, stream, call);
  }
  return error;
}

// The tokens of `gram` as a problem without trials.
template <class T>
Prepared<T> prepare_gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n,
                         std::int64_t m, const Device& device) {
  Problem<T> P{};
  P.B = B, P.n = n, P.m = m, P.K = 1, P.H = 1;
  P.x = z, P.x_batch = batch, P.x_row = row;
  return Prepared<T>(P, Results<T>{}, Order{}, device);
}

template <class T>
Drawing<T> drawing(const Source& S, std::int64_t B, bool is_gram, const Sample<T>& out) {
  return {S, B, S.d + 1 + (S.bias ? 1 : 0), is_gram, out, nullptr, 0};
}

template <class T>
Shape sample_shape(const Drawing<T>& given, const Device& device) {
  Arena arena;
  Drawn<T>(arena, given);
  return shape_of(device, static_cast<std::int64_t>(arena.used()), 1, (given.B + kLanes - 1) / kLanes);
}

}  // namespace

std::string describe(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

std::string why_not() {
  int devices = 0;
  const int error = static_cast<int>(cudaGetDeviceCount(&devices));
  constexpr int kInsufficientDriver = 35;  // what a machine without a driver says too
  if (error == kInsufficientDriver) return "there is no NVIDIA driver, or it is too old: " + describe(error);
  if (error != 0) return describe(error);
  return devices > 0 ? "" : "there is no CUDA device";
}

template <class T>
std::int64_t workspace_bytes(const Problem<T>& P, const Results<T>& out, int device) {
  return Prepared<T>(P, out, Order{}, Device(device)).workspace();
}

template <class T>
int attention(const Problem<T>& P, const Results<T>& out, const Order& order, void* workspace, int device,
              void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  Prepared<T> made(P, out, order, Device(device));
  made.place(workspace);
  return run(made, stream);
}

template <class T>
std::int64_t gram_bytes(std::int64_t B, std::int64_t n, std::int64_t m, int device) {
  return prepare_gram<T>(nullptr, 0, 0, B, n, m, Device(device)).workspace();
}

template <class T>
int gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n, std::int64_t m,
         T* G, void* workspace, int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  Prepared<T> made = prepare_gram(z, batch, row, B, n, m, Device(device));
  made.place(workspace);
  if (B == 0) return 0;
  return launch(gram_kernel<T>, made.shape.grid, dim3(kLanes, made.shape.warps), made.shape.shared_bytes(),
                stream, made.call, G);
}

template <class T>
std::int64_t sample_bytes(const Source& S, std::int64_t B, bool is_gram, int device) {
  return sample_shape(drawing<T>(S, B, is_gram, {}), Device(device)).scratch_bytes();
}

template <class T>
int sample(const Source& S, std::int64_t B, bool is_gram, const Sample<T>& out, void* workspace, int device,
           void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  Drawing<T> given = drawing(S, B, is_gram, out);
  const Shape shape = sample_shape(given, Device(device));
  given.scratch = shape.is_shared ? nullptr : static_cast<std::byte*>(workspace);
  given.scratch_bytes = shape.bytes;
  if (B == 0) return 0;
  return launch(sample_kernel<T>, shape.grid, dim3(kLanes), shape.shared_bytes(), stream, given);
}

int sample_tasks(const Source& S, std::int64_t B, std::int64_t* task, int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  if (B == 0) return 0;
  const std::int64_t most = std::int64_t{32} * Device(device).processors;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>((B + kThreads - 1) / kThreads, most));
  return launch(sample_tasks_kernel, grid, dim3(kThreads), 0, stream, S, B, task);
}

#define FASTLIN_INSTANTIATE(T)                                                                          \
  template std::int64_t workspace_bytes(const Problem<T>&, const Results<T>&, int);                     \
  template int attention(const Problem<T>&, const Results<T>&, const Order&, void*, int, void*);        \
  template std::int64_t gram_bytes<T>(std::int64_t, std::int64_t, std::int64_t, int);                   \
  template int gram(const T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, T*, \
                    void*, int, void*);                                                                 \
  template std::int64_t sample_bytes<T>(const Source&, std::int64_t, bool, int);                        \
  template int sample(const Source&, std::int64_t, bool, const Sample<T>&, void*, int, void*);
FASTLIN_INSTANTIATE(float)
FASTLIN_INSTANTIATE(double)
#undef FASTLIN_INSTANTIATE

}  // namespace cuda
}  // namespace fastlin
