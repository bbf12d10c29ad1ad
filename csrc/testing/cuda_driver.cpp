// Runs the launchers of csrc/cuda in emulation over the edge problems of attention_driver.cpp, in buffers of
// exactly their size. Results must agree with the naive oracle and have the same bits on every device that
// runs the same kernels, in every order of threads and blocks. Drawn sequences must agree with those of the
// CPU kernels.
//
//   cuda_driver edges <problems>   one device after another                         prints "ok <problems>"
//   cuda_driver drawn              every kind of source, on the same devices        prints "ok <sources>"
//   cuda_driver case <number> <order>   one problem of `edges`, in one order

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

// Shared memory of most GPUs, of sm_75, and too little for any workspace; several multiprocessors or one;
// four orders of threads and blocks.
constexpr emulated::Device kDevices[] = {
    {1, 4, 99 * 1024, 0}, {1, 1, 99 * 1024, 1}, {1, 1, 64 * 1024, 2}, {1, 1, 4 * 1024, 3}};

// An allocation of exactly this size, all NaN.
using Workspace = Buffer<unsigned char>;
Workspace nan_workspace(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  Workspace out(new unsigned char[static_cast<std::size_t>(bytes)]);
  std::memset(out.get(), 0xff, static_cast<std::size_t>(bytes));
  return out;
}

bool launched(int error) {
  if (error != 0) std::printf("%s\n", cuda::describe(error).c_str());
  return error == 0;
}

template <class T>
bool attend(const Problem<T>& P, const Results<T>& results) {
  const Workspace workspace = nan_workspace(cuda::workspace_bytes(P, results, 0));
  return launched(cuda::attention(P, results, workspace.get(), 0, nullptr));
}

template <class T>
Buffer<T> gram_of(const Problem<T>& P) {
  Buffer<T> G = nan_buffer<T>(P.B * P.m * P.m);
  const Workspace workspace = nan_workspace(cuda::gram_bytes<T>(P.B, P.n, P.m, 0));
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
  const CheckedProblem<T> checked(c);
  const Problem<T>& P = checked.owned.problem;
  const OwnedResults<T> first(c, checked.expected);
  Buffer<T> first_gram;
  std::string first_path;
  for (const emulated::Device& device : devices) {
    emulated::device = device;
    const bool is_first = &device == &devices.front();
    const OwnedResults<T> again(c, checked.expected);
    const OwnedResults<T>& outputs = is_first ? first : again;
    const std::string path = cuda::kernels_for(P, outputs.results, 0);
    if (is_first) first_path = path;
    const bool good = attend(P, outputs.results) &&
                      (is_first || path != first_path ? checked.holds(outputs) : same_bits(first, outputs));
    if (!good || !gram_holds(P, first_gram)) {
      std::printf("%s, order %u: %s\n", sizeof(T) == 4 ? "float" : "double", device.order,
                  describe(c).c_str());
      return false;
    }
    if (is_first && !P.is_gram && c.B > 0) first_gram = gram_of(P);
  }
  return true;
}

// Like the cases of attention_driver.cpp, but smaller. Some have more tiles than a small device runs at once;
// in a few, every block has several.
Case edge_case(int number) {
  Case c = draw_case(static_cast<std::uint64_t>(number), number % 16 < 15 ? 1e5 : 1e6);
  if (number % 16 == 7) {
    c = draw_case(static_cast<std::uint64_t>(number), 3e3);
    c.B = 130, c.m = 7, c.n = 9, c.is_gram = false;
  }
  // Only one kind of sum over lanes, trial after trial: no other sum synchronises the lanes.
  if (number % 16 == 11) {
    c = draw_case(static_cast<std::uint64_t>(number), 3e3);
    c.B = 33, c.m = 7, c.mode = Mode::kReverse, c.wants = 1u << 8, c.R = 9, c.layers = 0, c.is_gram = false;
  }
  if (number % 128 == 40) {
    c.B = 33000, c.n = 1, c.m = 2, c.t = 1, c.R = 1, c.H = 1, c.layers = 0, c.is_gram = false;
  }
  c.shares_v = false;  // the CUDA bindings refuse it
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
  std::fprintf(stderr, "largest error: %.3f of the tolerance\n", largest_error);
  return 0;
}

template <class T>
bool drawn_holds(const TestSource& source, std::int64_t B) {
  bool launches = true;
  const auto draw = [&](const Source& S, std::int64_t size, bool is_gram, const Sample<T>& out) {
    const Workspace workspace = nan_workspace(cuda::sample_bytes<T>(S, size, is_gram, 0));
    launches = launched(cuda::sample(S, size, is_gram, out, workspace.get(), 0, nullptr)) && launches;
  };
  const auto draw_on_cpu = [](const Source& S, std::int64_t size, bool is_gram, const Sample<T>& out) {
    kernels_of<T>(scalar::instruction_set).sample(S, size, is_gram, out, 1, {});
  };
  const auto attend_here = [&](const Problem<T>& P, const Results<T>& out) {
    launches = attend(P, out) && launches;
  };
  if (!draws_hold<T>(source, B, draw, draw_on_cpu, attend_here)) return false;
  std::vector<std::int64_t> tasks(static_cast<std::size_t>(B));
  launches = launched(cuda::sample_tasks(source.source, B, tasks.data(), 0, nullptr)) && launches;
  return launches && tasks == SampledBatch<T>(source, B, true, draw).task;
}

int drawn() {
  constexpr std::int64_t kBatches[] = {1, 33, 67};
  int done = 0;
  const bool good = all_sources_hold([&](const TestSource& source) {
    const std::int64_t B = kBatches[done % 3];
    emulated::device = kDevices[done++ % 4];
    return drawn_holds<float>(source, B) && drawn_holds<double>(source, B);
  });
  if (!good) return 1;
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
