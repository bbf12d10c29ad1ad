// The launchers of the generic kernels: how a call is cut up, where its workspace lies, and which kernels run
// one after another. More than one task: three launches sort by task. A drawn batch is drawn first, as Gram
// matrices in the workspace.
#include "cuda/generic.cuh"
#include "cuda/generic.h"
#include "cuda/sort.h"

namespace fastlin {
namespace cuda {
namespace {

constexpr std::int64_t kBlocks = 1024;            // of sequences: more than any GPU has room for at once
constexpr std::int64_t kPartialBytes = 64 << 20;  // for the sums of all blocks
constexpr std::int64_t kFewestBlocks = 32;
constexpr std::int64_t kScratchBytes = std::int64_t{1}
                                       << 29;  // of workspace that does not fit into shared memory
constexpr unsigned kThreads = 256;             // of kernels that do not work by warps

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

unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

// A call without addresses of workspace, and the shape of its main kernel.
template <class T>
struct Prepared {
  Call<T> call;
  Shape shape;
  std::int64_t partial, ends, records;  // bytes

  Prepared(const Problem<T>& P, const Results<T>& out, const Device& device)
      : call{P, out, Order{}, Record(P, out), 0, 0, 0, nullptr, nullptr, nullptr, nullptr, 0, 0, 0} {
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
    unsigned warps = static_cast<unsigned>(std::clamp<std::int64_t>(P.R, 1, kWarps));
    if (P.layers == 0 && !P.is_gram) warps = kWarps;  // tokens keep all of them busy
    if (call.of_data()) warps = 1;                    // sums over trials have one order
    std::int64_t bytes = measure(warps);
    while (bytes > device.shared_bytes && warps > 1 && measure(1) <= device.shared_bytes) {
      warps /= 2;
      bytes = measure(warps);
    }
    shape = shape_of(device, bytes, warps, call.blocks);
    call.scratch_bytes = bytes;
  }

  std::int64_t workspace() const { return partial + ends + records + round_up(shape.scratch_bytes()); }

  void place(std::byte* at) {
    call.partial = reinterpret_cast<double*>(at);
    call.ends = reinterpret_cast<double*>(at + partial);
    call.records = reinterpret_cast<double*>(at + partial + ends);
    call.scratch = shape.is_shared ? nullptr : at + partial + ends + records;
  }

 private:
  // Bytes of a block of threads. What forms the Gram matrices lies where the trials lie afterwards.
  std::int64_t measure(unsigned warps) {
    Arena context, forming, trial;
    Context<T>(context, call);
    Forming<T>(forming, call, 0, static_cast<int>(warps));
    if (call.P.layers > 0) {
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
  const auto kernel = call.P.layers > 0 ? attention_kernel<T, true> : attention_kernel<T, false>;
  int error = 0;
  if (call.blocks > 0) {
    error = launch(kernel, dim3(made.shape.grid), dim3(kLanes, made.shape.warps), made.shape.shared_bytes(),
                   stream, call);
  }
  const bool has_tasks = call.at.width > 0 || call.out.per_task != nullptr;
  if (error == 0 && (call.matrices > 0 || has_tasks)) {
    const std::int64_t tasks = has_tasks ? std::min<std::int64_t>(call.P.K * call.P.R, 1 << 30) : 0;
    const auto grid = static_cast<unsigned>((call.matrices + kLanes - 1) / kLanes + tasks);
    error = launch(sums_kernel<T>, dim3(grid), dim3(kLanes),
                   static_cast<std::size_t>(call.P.m) * sizeof(double), stream, call);
  }
  if (error == 0 && call.out.loss != nullptr) {
    error = launch(loss_kernel<T>, dim3(blocks_of(call.P.R)), dim3(kThreads), 0, stream, call);
  }
  return error;
}

// A drawn batch, kept.
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

template <class T>
int draw(Drawing<T> given, std::byte* scratch, const Device& device, void* stream) {
  const Shape shape = sample_shape(given, device);
  given.scratch = shape.is_shared ? nullptr : scratch;
  given.scratch_bytes = shape.bytes;
  if (given.B == 0) return 0;
  return launch(sample_kernel<T>, dim3(shape.grid), dim3(kLanes), shape.shared_bytes(), stream, given);
}

// A call with what comes before its main kernel: drawn sequences, and their order by task.
template <class T>
struct Staged {
  Problem<T> P;
  Source source{};
  Sample<T> drawn{};
  std::byte *scratch = nullptr, *main = nullptr;
  int* counts = nullptr;
  std::int64_t *sequence = nullptr, *sorted = nullptr, *start = nullptr;
  std::int64_t bytes;

  Staged(const Problem<T>& given, const Results<T>& out, const Device& device, void* workspace) : P(given) {
    Workspace parts(workspace);
    if (given.source != nullptr) {
      source = *given.source;
      drawn = {parts.take<T>(P.B * P.m * P.m), parts.take<T>(P.B * P.m), parts.take<T>(P.B),
               parts.take<std::int64_t>(P.B)};
      scratch =
          parts.take<std::byte>(sample_shape(drawing<T>(source, P.B, true, drawn), device).scratch_bytes());
      P.source = nullptr, P.is_gram = true, P.n = 0;
      P.x = drawn.x, P.x_batch = P.m * P.m, P.x_row = P.m;
      P.q = drawn.q, P.q_batch = P.m, P.y = drawn.y, P.task = drawn.task;
    }
    if (P.K > 1) {
      counts = parts.take<int>(sort_rows(P.B, P.K) * P.K);
      sequence = parts.take<std::int64_t>(P.B), sorted = parts.take<std::int64_t>(P.B);
      start = parts.take<std::int64_t>(P.K + 1);
    }
    // A pointer that is not null stands for targets that are not made yet.
    Problem<T> sized = P;
    T target;
    if (given.source != nullptr) sized.y = &target;
    main = parts.take<std::byte>(Prepared<T>(sized, out, device).workspace());
    bytes = parts.used();
  }
};

// The tokens of `gram` as a problem without trials.
template <class T>
Prepared<T> prepare_gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n,
                         std::int64_t m, const Device& device) {
  Problem<T> P{};
  P.B = B, P.n = n, P.m = m, P.K = 1, P.H = 1;
  P.x = z, P.x_batch = batch, P.x_row = row;
  return Prepared<T>(P, Results<T>{}, device);
}

}  // namespace

template <class T>
std::int64_t generic_bytes(const Problem<T>& P, const Results<T>& out, int device) {
  return Staged<T>(P, out, Device(device), nullptr).bytes;
}

template <class T>
int generic_attention(const Problem<T>& P, const Results<T>& out, void* workspace, int index, void* stream) {
  const Device device(index);
  const Staged<T> staged(P, out, device, workspace);
  int error = 0;
  if (P.source != nullptr) {
    error = draw(drawing<T>(staged.source, P.B, true, staged.drawn), staged.scratch, device, stream);
  }
  if (error == 0 && P.K > 1) {
    error = launch_sort(staged.P.task, P.B, P.K, staged.counts, staged.sequence, staged.sorted, staged.start,
                        stream);
  }
  if (error != 0) return error;
  Prepared<T> made(staged.P, out, device);
  made.call.order = {staged.sequence, staged.sorted, staged.start};
  made.place(staged.main);
  return run(made, stream);
}

template <class T>
std::int64_t generic_gram_bytes(std::int64_t B, std::int64_t n, std::int64_t m, int device) {
  return prepare_gram<T>(nullptr, 0, 0, B, n, m, Device(device)).workspace();
}

template <class T>
int generic_gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n,
                 std::int64_t m, T* G, void* workspace, int device, void* stream) {
  Prepared<T> made = prepare_gram(z, batch, row, B, n, m, Device(device));
  made.place(static_cast<std::byte*>(workspace));
  if (B == 0) return 0;
  return launch(gram_kernel<T>, dim3(made.shape.grid), dim3(kLanes, made.shape.warps),
                made.shape.shared_bytes(), stream, made.call, G);
}

template <class T>
std::int64_t generic_sample_bytes(const Source& S, std::int64_t B, bool is_gram, int device) {
  return sample_shape(drawing<T>(S, B, is_gram, {}), Device(device)).scratch_bytes();
}

template <class T>
int generic_sample(const Source& S, std::int64_t B, bool is_gram, const Sample<T>& out, void* workspace,
                   int device, void* stream) {
  return draw(drawing<T>(S, B, is_gram, out), static_cast<std::byte*>(workspace), Device(device), stream);
}

int generic_sample_tasks(const Source& S, std::int64_t B, std::int64_t* task, int device, void* stream) {
  if (B == 0) return 0;
  const std::int64_t most = std::int64_t{32} * Device(device).processors;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>((B + kThreads - 1) / kThreads, most));
  return launch(sample_tasks_kernel, dim3(grid), dim3(kThreads), 0, stream, S, B, task);
}

#define FASTLIN_INSTANTIATE(T)                                                                              \
  template std::int64_t generic_bytes(const Problem<T>&, const Results<T>&, int);                           \
  template int generic_attention(const Problem<T>&, const Results<T>&, void*, int, void*);                  \
  template std::int64_t generic_gram_bytes<T>(std::int64_t, std::int64_t, std::int64_t, int);               \
  template int generic_gram(const T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, \
                            T*, void*, int, void*);                                                         \
  template std::int64_t generic_sample_bytes<T>(const Source&, std::int64_t, bool, int);                    \
  template int generic_sample(const Source&, std::int64_t, bool, const Sample<T>&, void*, int, void*);
FASTLIN_INSTANTIATE(float)
FASTLIN_INSTANTIATE(double)
#undef FASTLIN_INSTANTIATE

}  // namespace cuda
}  // namespace fastlin
