// The instruction sets of this build, best first.

#include <string>
#include <vector>

#include "cpu/plan.h"
#include "kernels.h"

namespace fastlin {

#if defined(__x86_64__)
namespace avx512 {
extern const InstructionSet instruction_set;
}
namespace avx2 {
extern const InstructionSet instruction_set;
}
#elif defined(__aarch64__)
namespace neon {
extern const InstructionSet instruction_set;
}
#endif
namespace scalar {
extern const InstructionSet instruction_set;
}

const std::vector<const InstructionSet*>& instruction_sets() {
  static const std::vector<const InstructionSet*> all = {
#if defined(__x86_64__)
      &avx512::instruction_set,
      &avx2::instruction_set,
#elif defined(__aarch64__)
      &neon::instruction_set,
#endif
      &scalar::instruction_set,
  };
  return all;
}

template <class T>
std::string path_of(const Problem<T>& problem, const Results<T>& results, int lanes) {
  const std::string trials = trials_in_lanes(problem, results, lanes) > 0 ? " trials" : "";
  if (problem.source != nullptr) {
    const Path path = choose_path(problem);
    return path == Path::kStack      ? "sampled stack"
           : path == Path::kStreamed ? "sampled rows"
                                     : "sampled" + trials;
  }
  switch (choose_path(problem)) {
    case Path::kStreamed:
      return has_columns_in_lanes(problem, results, lanes) ? "streamed columns" : "streamed";
    case Path::kGram:
      return "gram" + trials;
    default:
      return "stack";
  }
}

template std::string path_of(const Problem<float>&, const Results<float>&, int);
template std::string path_of(const Problem<double>&, const Results<double>&, int);

}  // namespace fastlin
