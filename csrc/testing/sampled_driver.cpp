// Runs the kernels that draw sequences on every instruction set of this machine, and on the portable vectors,
// over edge sizes in buffers of exactly their size, for the sanitizers. Returns 0 if all of them draw the
// numbers of the scalar kernels, up to rounding, and if losses and gradients of drawn sequences equal those
// of the same sequences stored.

#include "testing/drawn_cases.h"
#include "testing/instruction_sets.h"
#include "testing/modes.h"

namespace fastlin {
namespace {

template <class T>
bool holds(const TestSource& source, std::int64_t B, const InstructionSet& set, int threads) {
  const auto draw_with = [](const InstructionSet& by, int count) {
    return [&by, count](const Source& S, std::int64_t size, bool is_gram, const Sample<T>& out) {
      kernels_of<T>(by).sample(S, size, is_gram, out, count, {});
    };
  };
  const auto attend = [&](const Problem<T>& problem, const Results<T>& results) {
    kernels_of<T>(set).attention(problem, results, threads, {});
  };
  const InstructionSet& scalar = *instruction_sets().back();
  return draws_hold<T>(source, B, draw_with(set, threads), draw_with(scalar, 1), attend);
}

int run(int threads, std::int64_t largest_batch) {
  int done = 0;
  for (const InstructionSet* set : tested_instruction_sets()) {
    for (std::int64_t B : {std::int64_t{1}, std::int64_t{17}, largest_batch}) {
      const bool good = all_sources_hold([&](const TestSource& source) {
        ++done;
        return holds<float>(source, B, *set, threads) && holds<double>(source, B, *set, threads);
      });
      if (good) continue;
      std::printf("%s, B %lld\n", set->name, static_cast<long long>(B));
      return 1;
    }
  }
  std::printf("ok %d\n", done);
  return 0;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  return fastlin::run_mode(
      count, arguments,
      {{"edges", [] { return fastlin::run(1, 67); }}, {"threads", [] { return fastlin::run(4, 200); }}});
}
