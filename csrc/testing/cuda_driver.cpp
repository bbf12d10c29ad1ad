// Runs the launchers of csrc/cuda in emulation over the edge problems of attention_driver.cpp, in buffers of
// exactly their size. Results must be those of the naive oracle, with the same bits on every device and in
// every order of threads and blocks; drawn sequences must be those of the CPU's kernels.
//
//   cuda_driver edges <problems>   one device after another                         prints "ok <problems>"
//   cuda_driver drawn              every kind of source, on the same devices        prints "ok <sources>"
//   cuda_driver case <number> <order>   one problem of `edges`, in one order

#include <algorithm>
#include <set>
#include <string>

#include "cuda/launch.h"
#include "testing/attention_check.h"
#include "testing/cuda_shim.h"
#include "testing/drawn_cases.h"

namespace fastlin {

namespace scalar {
extern const InstructionSet instruction_set;
}

namespace {

// As much shared memory as a block may have on most GPUs, as on sm_75, and so little that all workspace is
// global; several multiprocessors or one; three orders of threads and blocks.
constexpr emulated::Device kDevices[] = {{1, 4, 99 * 1024, 0}, {1, 1, 64 * 1024, 1}, {1, 1, 1024, 2}};

// Memory of exactly so many bytes, all NaN.
using Bytes = Buffer<unsigned char>;
Bytes memory(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  Bytes out(new unsigned char[static_cast<std::size_t>(bytes)]);
  std::memset(out.get(), 0xff, static_cast<std::size_t>(bytes));
  return out;
}

Buffer<std::int64_t> indices(std::int64_t count) {
  return Buffer<std::int64_t>(count == 0 ? nullptr : new std::int64_t[static_cast<std::size_t>(count)]);
}

// Sequences by task.
struct Sorted {
  Sorted(const std::int64_t* tasks, std::int64_t B, std::int64_t K) {
    if (K == 1) return;
    sequence = indices(B), task = indices(B), start = indices(K + 1);
    for (std::int64_t i = 0; i < B; ++i) sequence[i] = i;
    std::stable_sort(sequence.get(), sequence.get() + B,
                     [tasks](std::int64_t a, std::int64_t b) { return tasks[a] < tasks[b]; });
    for (std::int64_t i = 0; i < B; ++i) task[i] = tasks[sequence[i]];
    for (std::int64_t k = 0; k <= K; ++k)
      start[k] = std::lower_bound(task.get(), task.get() + B, k) - task.get();
  }
  cuda::Order order() const { return {sequence.get(), task.get(), start.get()}; }

  Buffer<std::int64_t> sequence, task, start;
};

bool launched(int error) {
  if (error != 0) std::printf("%s\n", cuda::describe(error).c_str());
  return error == 0;
}

template <class T>
bool attend(Problem<T> P, const Results<T>& results) {
  Buffer<std::int64_t> drawn;
  if (P.source != nullptr) {
    drawn = indices(P.B);
    if (!launched(cuda::sample_tasks(*P.source, P.B, drawn.get(), 0, nullptr))) return false;
  }
  const Sorted sorted(P.source != nullptr ? drawn.get() : P.task, P.B, P.K);
  P.task = nullptr;
  const Bytes workspace = memory(cuda::workspace_bytes(P, results, 0));
  return launched(cuda::attention(P, results, sorted.order(), workspace.get(), 0, nullptr));
}

template <class T>
Buffer<T> gram_of(const Problem<T>& P) {
  Buffer<T> G = poisoned<T>(P.B * P.m * P.m);
  const Bytes workspace = memory(cuda::gram_bytes<T>(P.B, P.n, P.m, 0));
  const int error = cuda::gram(P.x, P.x_batch, P.x_row, P.B, P.n, P.m, G.get(), workspace.get(), 0, nullptr);
  return launched(error) ? std::move(G) : nullptr;
}

template <class T>
bool gram_holds(const Problem<T>& P, const Buffer<T>& first) {
  const auto size = static_cast<std::size_t>(P.B * P.m * P.m);
  if (P.is_gram || size == 0) return true;
  const Buffer<T> G = gram_of(P);
  if (G == nullptr) return false;
  if (first != nullptr) return std::memcmp(first.get(), G.get(), size * sizeof(T)) == 0;
  return close(G.get(), evaluate_gram(P, false), evaluate_gram(P, true), static_cast<double>(P.n) + 1, "G");
}

template <class T>
bool edge_holds(const Case& c, const std::vector<emulated::Device>& devices) {
  const Question<T> question(c);
  const Problem<T>& P = question.given.problem;
  const Made<T> first(c, question.expected);
  Buffer<T> first_gram;
  for (const emulated::Device& device : devices) {
    emulated::device = device;
    const bool is_first = &device == &devices.front();
    const Made<T> again(c, question.expected);
    const Made<T>& made = is_first ? first : again;
    const bool good = attend(P, made.results) && (is_first ? question.holds(made) : same_bits(first, made));
    if (!good || !gram_holds(P, first_gram)) {
      std::printf("%s, order %u: %s\n", sizeof(T) == 4 ? "float" : "double", device.order,
                  describe(c).c_str());
      return false;
    }
    if (is_first && !P.is_gram && c.B > 0) first_gram = gram_of(P);
  }
  return true;
}

// As those of attention_driver.cpp, but smaller. In some there are more tiles than a small device takes at
// once, and in a few all blocks have several.
Case edge_case(int number) {
  Case c = draw_case(static_cast<std::uint64_t>(number), number % 16 < 15 ? 1e5 : 1e6);
  if (number % 16 == 7) {
    c = draw_case(static_cast<std::uint64_t>(number), 3e3);
    c.B = 130, c.m = 7, c.n = 9, c.is_gram = false;
  }
  // Sums over lanes of one kind alone, trial after trial: nothing that is done for others keeps lanes
  // together.
  if (number % 16 == 11) {
    c = draw_case(static_cast<std::uint64_t>(number), 3e3);
    c.B = 33, c.m = 7, c.mode = Mode::kReverse, c.wants = 1u << 8, c.R = 9, c.layers = 0, c.is_gram = false;
  }
  if (number % 128 == 40) {
    c.B = 33000, c.n = 1, c.m = 2, c.t = 1, c.R = 1, c.H = 1, c.layers = 0, c.is_gram = false;
  }
  c.shares_v = false;  // its bindings refuse it
  return c;
}

bool holds(int number, const std::vector<emulated::Device>& devices) {
  const Case c = edge_case(number);
  return number % 2 == 0 ? edge_holds<float>(c, devices) : edge_holds<double>(c, devices);
}

int edges(int count) {
  for (int i = 0; i < count; ++i) {
    if (!holds(i, {std::begin(kDevices), std::end(kDevices)})) return 1;
  }
  std::printf("ok %d\n", count);
  std::fprintf(stderr, "largest error: %.3f of the tolerance\n", worst);
  return 0;
}

const Kernels<float>& on_cpu(float) { return scalar::instruction_set.single; }
const Kernels<double>& on_cpu(double) { return scalar::instruction_set.dbl; }

template <class T>
bool drawn_holds(const Drawn& drawn, std::int64_t B) {
  bool good = true;
  const auto draw = [&good](const Source& S, std::int64_t size, bool is_gram, const Sample<T>& out) {
    const Bytes workspace = memory(cuda::sample_bytes<T>(S, size, is_gram, 0));
    good = launched(cuda::sample(S, size, is_gram, out, workspace.get(), 0, nullptr)) && good;
  };
  const auto draw_on_cpu = [](const Source& S, std::int64_t size, bool is_gram, const Sample<T>& out) {
    on_cpu(T()).sample(S, size, is_gram, out, 1, {});
  };
  const auto attend_here = [&good](const Problem<T>& P, const Results<T>& out) {
    good = attend(P, out) && good;
  };
  const Kept<T> kept(drawn, B, true, draw);
  good = close(kept, Kept<T>(drawn, B, true, draw_on_cpu)) && good;
  good = close(Kept<T>(drawn, B, false, draw), Kept<T>(drawn, B, false, draw_on_cpu)) && good;
  for (std::int64_t layers : {0, 1}) {
    good = close(answer<T>(drawn, B, layers, nullptr, attend_here),
                 answer<T>(drawn, B, layers, &kept, attend_here)) &&
           good;
  }
  std::vector<std::int64_t> tasks(static_cast<std::size_t>(B));
  good = launched(cuda::sample_tasks(drawn.source, B, tasks.data(), 0, nullptr)) && good;
  return good && tasks == kept.task;
}

int drawn() {
  int done = 0;
  for (Kind kind : {kMixture, kShares, kSphere, kFixed}) {
    for (std::int64_t n : {0, 1, 4, 9}) {
      emulated::device = kDevices[done % 3];
      const std::int64_t B = done % 3 == 0 ? 1 : done % 3 == 1 ? 33 : 67;
      const Drawn source(kind, n % 2 == 0 ? 5 : 2, n, n != 4);
      if (!drawn_holds<float>(source, B) || !drawn_holds<double>(source, B)) {
        std::printf("kind %d, n %lld, B %lld\n", kind, static_cast<long long>(n), static_cast<long long>(B));
        return 1;
      }
      ++done;
    }
  }
  std::printf("ok %d\n", done);
  return 0;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  using namespace fastlin;
  const std::string mode = count > 1 ? arguments[1] : "";
  if (mode == "edges" && count == 3) return edges(std::atoi(arguments[2]));
  if (mode == "drawn" && count == 2) return drawn();
  if (mode == "case" && count == 4) {
    emulated::Device device = kDevices[0];
    device.order = static_cast<unsigned>(std::atoi(arguments[3]));
    return holds(std::atoi(arguments[2]), {device}) ? 0 : 1;
  }
  std::puts("wants edges <problems>, drawn, or case <number> <order>");
  return 2;
}
