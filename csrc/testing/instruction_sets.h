// The instruction sets that a driver tests: those of this machine, and the portable vectors.
#pragma once

#include <vector>

#include "kernels.h"

namespace fastlin {

#ifndef FASTLIN_WITHOUT_PORTABLE
namespace portable64 {
extern const InstructionSet instruction_set;
}
namespace portable16 {
extern const InstructionSet instruction_set;
}
#endif

inline std::vector<const InstructionSet*> tested_instruction_sets() {
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

}  // namespace fastlin
