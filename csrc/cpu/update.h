// The optimiser update on a CPU.
#pragma once

#include <vector>

#include "core/update.h"

namespace fastlin {

// Trials do not interact, and one thread updates a trial: the bits are the same for any number of threads.
template <class T>
void update(const UpdateRule& rule, const UpdatedTrials<T>& trials,
            const std::vector<UpdatedParameter<T>>& parameters, int threads);

}  // namespace fastlin
