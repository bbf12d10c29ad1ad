// Elements that testing/guarded/core/arena.h cuts off the end of each workspace array. attention_driver sets
// it to prove that AddressSanitizer reports an overrun of the workspace.
#pragma once

#include <cstdint>

namespace fastlin {
inline std::int64_t planted_shortage = 0;
}
