// Runs the kernels that draw sequences on every instruction set of this machine, and on the portable vectors,
// over edge sizes in buffers of exactly their size, for the sanitizers. Returns 0 when all of them draw the
// numbers of the scalar kernels up to rounding, and when losses and gradients of drawn sequences are those of
// the same sequences kept.

#include <cstdio>
#include <string>

#include "testing/drawn_cases.h"

namespace fastlin {

#ifndef FASTLIN_WITHOUT_PORTABLE
namespace portable64 {
extern const InstructionSet instruction_set;
}
namespace portable16 {
extern const InstructionSet instruction_set;
}
#endif
std::int64_t planted_shortage = 0;  // of the workspace's arrays, where it is guarded: none here

namespace {

std::vector<const InstructionSet*> sets_here() {
  std::vector<const InstructionSet*> sets;
  for (const InstructionSet* set : instruction_sets()) {
    if (set->runs_here()) sets.push_back(set);
  }
#ifndef FASTLIN_WITHOUT_PORTABLE
  sets.push_back(&portable64::instruction_set);
  sets.push_back(&portable16::instruction_set);
#endif
  return sets;
}

const Kernels<float>& kernels_of(const InstructionSet& set, float) { return set.single; }
const Kernels<double>& kernels_of(const InstructionSet& set, double) { return set.dbl; }

template <class T>
bool holds(const Drawn& drawn, std::int64_t B, const InstructionSet& set, int threads) {
  const auto draws_by = [](const InstructionSet& by, int count) {
    return [&by, count](const Source& source, std::int64_t size, bool is_gram, const Sample<T>& out) {
      kernels_of(by, T()).sample(source, size, is_gram, out, count, {});
    };
  };
  const auto attend = [&](const Problem<T>& problem, const Results<T>& results) {
    kernels_of(set, T()).attention(problem, results, threads, {});
  };
  const auto here = draws_by(set, threads), scalar = draws_by(*instruction_sets().back(), 1);
  const Kept<T> kept(drawn, B, true, here);
  if (!close(kept, Kept<T>(drawn, B, true, scalar))) return false;
  if (!close(Kept<T>(drawn, B, false, here), Kept<T>(drawn, B, false, scalar))) return false;
  for (std::int64_t layers : {0, 1}) {
    if (!close(answer<T>(drawn, B, layers, nullptr, attend), answer<T>(drawn, B, layers, &kept, attend))) {
      return false;
    }
  }
  return true;
}

int run(bool many_threads) {
  int done = 0;
  for (const InstructionSet* set : sets_here()) {
    for (Kind kind : {kMixture, kShares, kSphere, kFixed}) {
      for (std::int64_t n : {0, 1, 4, 9}) {
        for (std::int64_t B : {1, 17, many_threads ? 200 : 67}) {
          const Drawn drawn(kind, n % 2 == 0 ? 5 : 2, n, n != 4);
          const int threads = many_threads ? 4 : 1;
          if (!holds<float>(drawn, B, *set, threads) || !holds<double>(drawn, B, *set, threads)) {
            std::printf("%s: kind %d, n %lld, B %lld\n", set->name, kind, static_cast<long long>(n),
                        static_cast<long long>(B));
            return 1;
          }
          ++done;
        }
      }
    }
  }
  std::printf("ok %d\n", done);
  return 0;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  const std::string mode = count == 2 ? arguments[1] : "";
  if (mode == "edges" || mode == "threads") return fastlin::run(mode == "threads");
  std::puts("wants edges or threads");
  return 2;
}
